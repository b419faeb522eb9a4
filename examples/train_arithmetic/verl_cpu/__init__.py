"""verl's trainer on a machine without a GPU, with a real SGLang server: for laptops and CI.

Invariants:

- Nothing installed is edited or patched. verl has registries for platforms, rollouts and checkpoint engines, and
  `register` adds the CPU's entries. `environment` sets the variables and verl settings that this requires.
- The package stays light, because verl imports it in every process that it starts (VERL_USE_EXTERNAL_MODULES). It
  does nothing unless the process belongs to a run on the CPU.
"""

import os

if os.environ.get("VERL_PLATFORM") == "cpu":
    from verl_cpu import register  # noqa: F401
