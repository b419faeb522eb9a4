"""Load a scorer, a Python function or a command that computes rewards, and call it.

Invariant: a score is a finite number that the scorer returned, or absent.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import MappingProxyType, ModuleType
from typing import Any, Self

import msgpack
from pydantic import Field

from agent_wrapper.contract import ContractObject, Rollout, check_rewards
from agent_wrapper.shared.child_output import ChildOutput, wait
from agent_wrapper.shared.json_values import finite_number, read_extras
from rollout_backend.core.reasons import ARTIFACT_LOST, SCORER_FAILED
from rollout_backend.errors import ConfigError

# The module name of a scorer's file whose own name belongs to another module.
_MODULE = "rollout_scorer"
_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_STDERR_CHARS = _MESSAGE_CHARS = 2_000
# Only the end of an output is kept, which holds the last line.
_KEPT_BYTES = 16 * 1024 * 1024
# Children may print the command's output after its exit, as in `exec > >(tee log)`.
_GRACE_S = 5.0


class ScoringError(Exception):
    """The scorer failed, or did not return a finite number. The message names the type, the text and the line.

    It may quote the model's reply, so it is cut.
    """

    reason = SCORER_FAILED

    def __init__(self, message: str) -> None:
        super().__init__(message[:_MESSAGE_CHARS])


class ArtifactLost(ScoringError):
    """The artifacts that a result lists are missing or different."""

    reason = ARTIFACT_LOST


@dataclass(frozen=True)
class ScoreInput:
    """The input of a scorer: one rollout, and its task with the part that no agent sees."""

    task_id: str
    payload: dict[str, Any]
    """The task as the agent received it."""
    private: dict[str, Any]
    """The task's private part; empty if it has none."""
    rollout: Rollout
    """The result with its segments and turns."""
    artifacts: dict[str, bytes] = field(default_factory=dict)
    """Files that the agent published, by name."""

    @classmethod
    def unpack(cls, request: bytes) -> Self:
        """Decode the output of `pack_request`. Raises ContractError if the result in it is invalid."""
        fields = msgpack.unpackb(request, ext_hook=lambda _, digits: int(digits))
        return cls(rollout=Rollout.decode(fields.pop("result")), **fields)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the last conversation, in OpenAI's format."""
        return [*self.rollout.segments[-1].messages] if self.rollout.segments else []

    @property
    def reply(self) -> str:
        """Return the text of the last assistant message, or an empty string."""
        said = [each.get("content") for each in self.messages if each.get("role") == "assistant"]
        return _text(said[-1]) if said else ""

    @property
    def agent_reward(self) -> float | None:
        """Return the reward that the agent itself returned."""
        return self.rollout.reward

    @property
    def extras(self) -> dict[str, Any]:
        """Return the other values that the agent returned."""
        return dict(self.rollout.extras)

    def to_json(self) -> bytes:
        """Return the same fields as JSON, as input for a command."""
        names = ("task_id", "payload", "private", "messages", "reply", "agent_reward", "extras")
        fields = {name: getattr(self, name) for name in names}
        rollout = {"rollout_id": self.rollout.rollout_id, "outcome": self.rollout.outcome.value}
        return json.dumps(fields | rollout, ensure_ascii=False).encode()


def pack_request(fields: Mapping[str, Any]) -> bytes:
    """Encode the fields of a `ScoreInput` with its encoded result. An integer beyond 64 bits, which msgpack lacks,
    becomes an extension."""
    data: bytes = msgpack.packb(fields, default=lambda number: msgpack.ExtType(0, str(number).encode()))
    return data


class Score(ContractObject):
    """A scorer's result, and which scorer it was."""

    scorer: str
    sha256: str
    """Digest of the scorer's file or command."""
    reward: float
    turn_rewards: tuple[float, ...] = ()
    extras: dict[str, Any] = Field(default_factory=dict)
    """Other values of the returned dict."""


@dataclass(frozen=True)
class Scorer:
    """A function from a `ScoreInput` to a reward, and the file that defines it."""

    name: str
    file: Path
    sha256: str
    function: Callable[[ScoreInput], Any] = field(repr=False)
    is_async: bool = False
    where: str = ""
    """The argument with which `load_scorer` loaded it, and with which another process loads it once."""

    def __reduce__(self) -> tuple[Callable[[str], "Scorer"], tuple[str]]:
        return _load_once, (self.where,)

    def score(self, given: ScoreInput) -> Score:
        """Return the score of a rollout from a plain function.

        Raises:
            ScoringError: there is none.
        """
        with self._errors():
            return self._read(self.function(given), given)

    async def score_async(self, given: ScoreInput) -> Score:
        """Return the score of a rollout from an async function. All calls must use the same event loop.

        Raises:
            ScoringError: there is none.
        """
        with self._errors():
            return self._read(await self.function(given), given)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except ScoringError:
            raise
        except (Exception, SystemExit) as error:
            raise ScoringError(f"{type(error).__name__}: {error}{self._line_of(error)}") from None

    def _read(self, returned: object, given: ScoreInput) -> Score:
        fields: dict[str, Any] = {}
        if isinstance(returned, Mapping):
            fields = dict(returned)
            if "reward" not in fields:
                raise ScoringError(f"the scorer returned a dict without 'reward' (it has {sorted(map(str, fields))})")
            returned = fields.pop("reward")
        of_turns = fields.pop("turn_rewards", ())
        turns = sum(len(segment.turns) for segment in given.rollout.segments)
        try:
            reward, turn_rewards = finite_number(returned), tuple(finite_number(each) for each in of_turns)
            check_rewards(reward, turn_rewards)
            extras = read_extras(fields)
        except (TypeError, ValueError) as error:
            raise ScoringError(str(error)) from None
        if turn_rewards and len(turn_rewards) != turns:
            raise ScoringError(f"the scorer returned {len(turn_rewards)} turn_rewards for {turns} turns")
        return Score(scorer=self.name, sha256=self.sha256, reward=reward, turn_rewards=turn_rewards, extras=extras)

    def _line_of(self, error: BaseException) -> str:
        """Return the innermost line of the traceback in the scorer's file, or else in any file."""
        # The first two frames belong to this module.
        frames = traceback.extract_tb(error.__traceback__)[2:]
        own = [frame for frame in frames if Path(frame.filename) == self.file] or frames
        return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""


def configured_scorer(settings: Mapping[str, Any]) -> Scorer:
    """Return the scorer of the section `scoring`. Raises ConfigError as `load_scorer` does."""
    if settings["function"] is not None:
        return load_scorer(settings["function"])
    return command_scorer(settings["command"], settings["timeout_s"])


def load_scorer(where: str) -> Scorer:
    """Import a scorer named as `FILE.py:function` or `module:function`. It may be async.

    A function with verl's arguments (data_source, solution_str, ground_truth, extra_info) is accepted, too.

    Raises:
        ConfigError: it cannot be imported, or is not a function with a scorer's arguments.
    """
    source, separator, name = where.rpartition(":")
    if not separator or not source or not name:
        raise ConfigError(f"the scorer {where!r} must look like FILE.py:function or module:function")
    module = _import(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{source} has no function {name!r}")
    if module.__file__ is None:
        raise ConfigError(f"{source} is no Python file")
    file = Path(module.__file__)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    is_async = inspect.iscoroutinefunction(function)
    adapted = _adapted(function, is_async, f"{name} in {source}")
    return Scorer(name, file, digest, adapted, is_async, where)


_load_once = functools.cache(load_scorer)


def command_scorer(command: Sequence[str], timeout_s: float | None) -> Scorer:
    """Return a scorer that runs a command. Its digest covers the arguments, and the content of those that are files.

    Raises:
        ConfigError: the program does not exist.
    """
    digest = hashlib.sha256(json.dumps([*command]).encode())
    for argument in command:
        if Path(argument).is_file():
            digest.update(Path(argument).read_bytes())
    file = Path(command[0])

    def score(given: ScoreInput) -> object:
        return run_command(command, given.to_json(), timeout_s, given.artifacts)

    return Scorer(file.name, file, digest.hexdigest(), score)


def _adapted(function: Callable[..., Any], is_async: bool, what: str) -> Callable[[ScoreInput], Any]:
    """Return `function`, or one that passes a `ScoreInput` to it by verl's argument names.

    Raises:
        ConfigError: it takes neither one argument nor verl's.
    """

    def call(given: ScoreInput) -> object:
        return _read_verl_result(function(**_verl_arguments(given)))

    async def call_async(given: ScoreInput) -> object:
        return _read_verl_result(await function(**_verl_arguments(given)))

    if _accepts(function, **dict.fromkeys(_VERL_ARGUMENTS)):
        return call_async if is_async else call
    if not _accepts(function, None):
        raise ConfigError(
            f"{what} must accept one argument, a ScoreInput, or verl's arguments {', '.join(_VERL_ARGUMENTS)}"
        )
    return function


def _accepts(function: Callable[..., object], *arguments: object, **named: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **named)
    except (TypeError, ValueError):
        return False
    return True


def _verl_arguments(given: ScoreInput) -> dict[str, Any]:
    """Return the arguments of verl's reward managers. `extra_info` is always a dict, with the number of turns."""
    named = {name: given.private.get(name) for name in _VERL_ARGUMENTS}
    extra_info = {} if named["extra_info"] is None else named["extra_info"]
    if not isinstance(extra_info, Mapping):
        raise ScoringError(f"extra_info of the private part is a {type(extra_info).__name__}, and must be an object")
    of_verl = {"num_turns": _verl_turns(given.messages), "rollout_reward_scores": {}}
    return named | {"solution_str": given.reply, "extra_info": {**extra_info, **of_verl}}


def _verl_turns(messages: Sequence[Mapping[str, Any]]) -> int:
    """Count turns as verl's agent loops do. Each reply of the model is a turn, and so are the messages before it
    together, for example the results of several calls."""
    replies = [
        each.get("role") == "assistant" for each in messages if each.get("role") not in ("system", "developer")
    ]
    return sum(reply or i == 0 or replies[i - 1] for i, reply in enumerate(replies))


def _read_verl_result(returned: object) -> object:
    if not isinstance(returned, Mapping):
        return returned
    if "score" not in returned:
        raise ScoringError(f"the function returned a dict without 'score' (it has {sorted(map(str, returned))})")
    return {**{key: value for key, value in returned.items() if key != "score"}, "reward": returned["score"]}


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _import(source: str) -> ModuleType:
    path = Path(source)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ConfigError(f"there is no file {path}")
    # `python FILE.py` does the same.
    sys.path.insert(0, str(path.absolute().parent if is_file else Path.cwd()))
    try:
        return _load(path.absolute()) if is_file else importlib.import_module(source)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise ConfigError(f"{source} cannot be imported: {type(error).__name__}: {error}{place}") from None


def _load(path: Path) -> ModuleType:
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look up their module here.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _module_name(path: Path) -> str:
    """Return the name by which processes of `multiprocessing` can import the file, unless it is another module's.

    `spawn` and `forkserver` give `sys.path` to their processes, and pickle functions by their module's name.
    """
    importlib.invalidate_caches()
    loaded = sys.modules.get(path.stem)
    try:
        found = importlib.util.find_spec(path.stem) if loaded is None else loaded.__spec__
    except (ImportError, ValueError):
        found = None
    own = found is not None and found.origin is not None and Path(found.origin).absolute() == path
    return path.stem if own else _MODULE


def run_command(
    command: Sequence[str],
    given: bytes,
    timeout_s: float | None,
    artifacts: Mapping[str, bytes] = MappingProxyType({}),
) -> object:
    """Run a command as a scorer. It reads one rollout as JSON from stdin, and prints the reward in its last line.
    Returns the number that it printed, or a dict with a number under 'reward'.

    While it runs, the artifacts are files in the folder $ROLLOUT_ARTIFACTS.

    Raises:
        ValueError: the command failed, or printed neither. The message includes the end of its stderr.
        subprocess.TimeoutExpired: the command took longer than `timeout_s`. Its children may still run.
        OSError: the command cannot be executed.
    """
    with (
        TemporaryDirectory(prefix="rollout-artifacts-") as folder,
        TemporaryFile() as stdin,
        contextlib.closing(ChildOutput(_KEPT_BYTES)) as stdout,
        contextlib.closing(ChildOutput(_KEPT_BYTES)) as stderr,
    ):
        for name, content in artifacts.items():
            Path(folder, name).write_bytes(content)
        environment = os.environ | {"ROLLOUT_ARTIFACTS": folder}
        stdin.write(given)
        stdin.seek(0)
        # The command comes from the user's own settings.
        with subprocess.Popen(
            [*command], stdin=stdin, stdout=stdout.write_end, stderr=stderr.write_end, env=environment
        ) as process:
            try:
                code = wait(process, (stdout, stderr), timeout_s, _GRACE_S)
            except BaseException:
                process.kill()
                raise
    if code:
        end = stderr.text().strip()[-_STDERR_CHARS:] or "it printed nothing to stderr"
        raise ValueError(f"the command exited with {code}: {end}")
    last = stdout.text().strip().rpartition("\n")[2]
    try:
        return json.loads(last)
    except ValueError:
        shown = repr(last[:100]) if last else "nothing"
        raise ValueError(f"the command printed {shown} as its last line, and not a number or a JSON object") from None
