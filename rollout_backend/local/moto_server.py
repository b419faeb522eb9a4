"""Serve moto: `python -m rollout_backend.local.moto_server -H 127.0.0.1 -p 5000`.

It takes two thirds of the CPU time of `python -m moto.server`, which lists its own folder and writes a line for each
request.
"""

from __future__ import annotations

import logging

from moto import backends
from moto.server import main

if __name__ == "__main__":
    modules = frozenset(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: modules
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    main()
