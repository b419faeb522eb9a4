"""Fixtures for tests of agents. Being loaded by every pytest run, it imports nothing until a fixture is used."""
