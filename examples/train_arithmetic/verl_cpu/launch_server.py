"""`python launch_server.py ARGUMENTS`: SGLang's `launch_server`, with memory that can be released as on a GPU.

SGLang releases and resumes the memory, and asserts that no request runs meanwhile; on the CPU the memory is not
freed. So this script raises, like a GPU, when a batch runs on released memory: the scheduler dies of the error, and
the server with it. The engine's interpreter runs the script, so it imports SGLang only.
"""

import runpy
from typing import Any

from sglang.srt.managers.scheduler import Scheduler  # type: ignore[import-not-found]  # in the engine's environment

_run_batch = Scheduler.run_batch


def run_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.weight_updater.offload_tags:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return _run_batch(self, *args, **kwargs)


Scheduler.run_batch = run_batch  # the scheduler's process imports this file too, as its parent's main module

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
