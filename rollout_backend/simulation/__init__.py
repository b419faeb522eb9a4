"""Simulate a run deterministically: the production code in virtual time, with planned faults.

One seed is one history. `world` defines the faults, `checks` what must hold under every fault, and `mutants` variants
of the code that are broken on purpose and that the checks must catch.
"""
