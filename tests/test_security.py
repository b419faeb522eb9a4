"""Lint refuses code that executes its input or trusts any server."""

import json
import subprocess
import sys

UNSAFE = """\
import pickle
from pickle import loads
import cloudpickle as c
def f(): import dill.source
eval(c)
import yaml; yaml.load(c)
from yaml import unsafe_load
import numpy as np; np.load(c, allow_pickle=True)
import torch; torch.load(c, weights_only=False)
from subprocess import run; run(c, shell=True)
import httpx; httpx.get(c, verify=False)
"""


def test_lint_finds_unsafe_code(repository):
    for folder in ("agent_wrapper", "rollout_backend", "examples", "benchmarks", "docs"):
        options = ["--output-format", "json", "--stdin-filename", f"{folder}/a.py", "-"]
        argv = [sys.executable, "-m", "ruff", "check", *options]
        done = subprocess.run(argv, input=UNSAFE, cwd=repository, capture_output=True, text=True, check=False)
        lines = {each["location"]["row"] for each in json.loads(done.stdout) if each["code"][0] in "ST"}
        assert lines == set(range(1, UNSAFE.count("\n") + 1)), folder
