"""Load a scorer, a Python function that computes rewards, and call it."""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from agent_wrapper.contract import Rollout
from agent_wrapper.outcome import finite_number
from rollout_backend.errors import ConfigError

_MODULE = "rollout_scorer"  # the name of a scorer's file as a module, which shadows no other module

ScoreFunction = Callable[[dict[str, Any], Sequence[Mapping[str, Any]], Rollout], object]


class ScoringError(Exception):
    """The scorer raised, or returned no finite number. The message names the type, the text and the line."""


@dataclass(frozen=True)
class Scorer:
    """A function with the arguments (payload, messages, rollout), and the file that defines it."""

    name: str
    file: Path
    sha256: str
    function: ScoreFunction

    def score(self, payload: Mapping[str, Any], rollout: Rollout) -> float:
        """Return the reward of a rollout.

        Raises:
            ScoringError: there is none.
        """
        messages = [*_messages(rollout)]
        try:
            reward = self.function(copy.deepcopy(dict(payload)), messages, rollout)
        except (Exception, SystemExit) as error:
            raise ScoringError(f"{type(error).__name__}: {error}{self._line_of(error)}") from None
        try:
            return finite_number(reward)
        except ValueError as error:
            raise ScoringError(str(error)) from None

    def _line_of(self, error: BaseException) -> str:
        """Return the innermost line of the scorer's file, or of any file, that the error passed."""
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
        own = [frame for frame in frames if Path(frame.filename) == self.file] or frames
        return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""


def load_scorer(where: str) -> Scorer:
    """Import a scorer, named as `FILE.py:function` or `module:function`.

    Raises:
        ConfigError: it cannot be imported, or is no function that can be a scorer.
    """
    source, separator, name = where.rpartition(":")
    if not separator or not source or not name:
        raise ConfigError(f"the scorer {where!r} must look like FILE.py:function or module:function")
    module = _import(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{source} has no function {name!r}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name} in {source} is async: a scorer must be a plain function")
    try:
        inspect.signature(function).bind({}, [], None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} in {source} must accept (payload, messages, rollout): {error}") from None
    if module.__file__ is None:
        raise ConfigError(f"{source} is no Python file")
    file = Path(module.__file__)
    return Scorer(name, file, hashlib.sha256(file.read_bytes()).hexdigest(), function)


def _import(source: str) -> ModuleType:
    path = Path(source)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ConfigError(f"there is no file {path}")
    sys.path.insert(0, str(path.absolute().parent if is_file else Path.cwd()))  # as `python FILE.py` does
    try:
        return _load(path.absolute()) if is_file else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise ConfigError(f"{source} cannot be imported: {type(error).__name__}: {error}{place}") from None


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


def _messages(rollout: Rollout) -> Sequence[Mapping[str, Any]]:
    """Return the messages of the last conversation."""
    conversations = rollout.segments or rollout.conversations
    return conversations[-1].messages if conversations else ()
