"""`python launch_server.py ARGUMENTS`: SGLang's `launch_server`, with memory that can be released as on a GPU.

SGLang releases and resumes the memory, and asserts that no request runs meanwhile; on the CPU the memory is not
freed. So this script raises, like a GPU, when a batch runs on released memory: the scheduler dies of the error, and
the server with it. The engine's interpreter runs the script, so it imports SGLang only.

Like SGLang 0.5.12, which verl 0.9.1 pins, the server notices a dropped stream only after 2 s. Until then the request
runs, and a pause does not wait for it. SGLang 0.5.23 aborts the request at once.
"""

import asyncio
import runpy
import sys
from typing import Any

from sglang.srt.managers.scheduler import Scheduler  # type: ignore[import-not-found]  # in the engine's environment
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # type: ignore[import-not-found]

_run_batch = Scheduler.run_batch


def run_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.weight_updater.offload_tags:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return _run_batch(self, *args, **kwargs)


_release = TokenizerManager._release_req_states_on_failure


def release_req_states_on_failure(self: Any, states: Any) -> None:
    if not isinstance(sys.exception(), GeneratorExit | asyncio.CancelledError):
        _release(self, states)


TokenizerManager._release_req_states_on_failure = release_req_states_on_failure
Scheduler.run_batch = run_batch  # the scheduler's process imports this file too, as its parent's main module

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
