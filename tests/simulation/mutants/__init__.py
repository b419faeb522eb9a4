"""Deliberately broken variants of the production code, each without one guard.

They test the simulator's checks: each variant must be caught by some seed. A mutant replaces public functions and
methods only, so that the production code can be rearranged freely behind them.
"""

from tests.simulation.mutants import calls, ownership, policies, restarts, results, sessions
from tests.simulation.mutants.registry import MUTANTS, mutated

__all__ = ["MUTANTS", "calls", "mutated", "ownership", "policies", "restarts", "results", "sessions"]
