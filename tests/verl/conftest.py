"""These tests need verl, which has an environment of its own; elsewhere none of them is collected."""

from __future__ import annotations

import importlib.util
import os
import warnings

from rollout_backend.local.verl_cpu.environment import environment

if importlib.util.find_spec("verl") is None:
    collect_ignore_glob = ["*.py"]
else:
    # Before verl is imported anywhere: it looks for its platform once.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(environment(threads=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its and its dependencies' own; ours are errors
        import ray  # noqa: F401
        import verl.trainer.ppo.v1
        import verl.workers.rollout.replica  # noqa: F401
