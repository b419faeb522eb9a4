"""A deterministic simulation of a run: the production code in a world of virtual time and planned misfortune.

One seed is one history. See `world` for what can go wrong, `checks` for what must hold whatever goes wrong, and
`mutants` for deliberately broken variants that the checks must catch.
"""
