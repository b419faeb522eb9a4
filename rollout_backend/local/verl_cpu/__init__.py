"""verl's real trainer on a machine without a GPU, with a real SGLang server beside it: for laptops and for CI.

What must always hold: nothing installed is edited or patched. verl has registries for platforms, rollouts and
checkpoint engines, and what is missing for the CPU is entered there (`register`). `environment` says which variables
and which of verl's settings that takes.

verl imports this package in every process that it starts (VERL_USE_EXTERNAL_MODULES). So it stays light, and does
nothing unless the process is one of a run on the CPU.
"""

import os

if os.environ.get("VERL_PLATFORM") == "cpu":
    from rollout_backend.local.verl_cpu import register  # noqa: F401
