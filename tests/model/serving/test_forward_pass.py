"""The forward pass with which tests on real engines compare logprobs."""

import sys
from pathlib import Path

import pytest

from rollout_backend.errors import ServingError
from rollout_backend.testing.forward_pass import reference_logprobs


def test_failed_forward_pass_reports_its_output(tmp_path):
    with pytest.raises(ServingError, match=r"forward pass with .* failed[\s\S]*No module named 'torch'"):
        reference_logprobs(Path(sys.executable), tmp_path, [[1, 2]])


def test_invalid_temperatures_are_refused(tmp_path):
    for temperatures in ([1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="one number above 0 for each"):
            reference_logprobs(Path(sys.executable), tmp_path, [[1], [2]], temperatures)
