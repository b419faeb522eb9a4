"""Translate the APIs that agents speak to and from `model.model_call`.

To add an API, subclass `base.Dialect` in a module of this package, and list the class in `registry`.
"""
