"""The journal: sessions continue after a restart of their gateway, or are refused."""

import asyncio
import errno
import gc
import json
import os
import re
import threading
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from agent_wrapper.contract import Trajectory
from builders import Clock, assistant, eventually, function_tool, hang_up, tool_result, until, user
from rollout_backend.core.seal import SealClaims, Sealer
from rollout_backend.core.session_key import KeyRefused, issue, read_claims, verify
from rollout_backend.errors import ConfigError
from rollout_backend.model.gateway.sessions import journal as journals
from rollout_backend.model.gateway.sessions import journal_writer
from rollout_backend.model.gateway.sessions.journal import SessionJournal
from rollout_backend.model.gateway.sessions.journal_folder import OPEN_FILES, prepare
from rollout_backend.model.gateway.sessions.registry import MAX_UNANSWERED, SessionRegistry
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.model_call import ApiError
from rollout_backend.model.serving.run_secret import key_secret
from rollout_backend.workbench.local.scripted import Fail, ScriptedEngine

SEAL_SECRET = "the seals of this run " * 2
RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "gateway" / "0-of-1"
    prepare(folder)
    return folder


@pytest.fixture
def open_journal(folder):
    """Open the folder's journal. The one opened before is released first, as by the death of its process."""
    journals_open: list[SessionJournal] = []

    def release() -> None:
        while journals_open:
            journals_open.pop().release()

    def open_() -> SessionJournal:
        release()
        journals_open.append(SessionJournal(folder))
        return journals_open[-1]

    yield open_
    release()


@pytest.fixture
def journal(open_journal) -> SessionJournal:
    return open_journal()


def read(journal: SessionJournal, session_id: str) -> list[journals.Record]:
    return journals.decode(journal.load(session_id))


def session_file(folder: Path) -> Path:
    [path] = (folder / "sessions").iterdir()
    return path


# --- the files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["1 byte less", "5 bytes less", "11 bytes less", "a changed byte"])
def test_a_damaged_record_is_dropped_and_later_ones_are_read(folder, journal, damage):
    for i in range(3):
        journal.append("s", {"i": i})
    path = session_file(folder)
    data = path.read_bytes()
    path.write_bytes(
        data[:-1] + bytes([data[-1] ^ 1]) if damage == "a changed byte" else data[: -int(damage.split()[0])]
    )
    assert read(journal, "s") == [{"i": 0}, {"i": 1}]
    journal.append("s", {"i": 3})
    assert read(journal, "s") == [{"i": 0}, {"i": 1}, {"i": 3}]


def test_a_failed_write_leaves_no_partial_record(journal, monkeypatch):
    journal.append("s", {"i": 0})
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 4:
            return write(descriptor, data[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="space"):
        journal.append("s", {"i": 1234567})
    monkeypatch.undo()
    journal.append("s", {"i": 2})
    assert read(journal, "s") == [{"i": 0}, {"i": 2}]


def test_only_the_owner_can_read_the_journal(folder, journal):
    journal.append("s", {})
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert (folder / "sessions").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o600}
    journal.release()
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        prepare(folder)


def test_two_gateways_cannot_use_one_folder(folder, journal, open_journal):
    with pytest.raises(ConfigError, match="another gateway uses"):
        SessionJournal(folder)
    with pytest.raises(ConfigError, match="another gateway uses"):
        prepare(folder, wait_s=0.0)
    open_journal()


@pytest.mark.parametrize("part", ["sessions", "closed", "journal_id"])
def test_a_folder_with_a_missing_part_is_a_new_journal(folder, part):
    before = prepare(folder)
    assert prepare(folder) == before
    path = folder / part
    path.rmdir() if path.is_dir() else path.unlink()
    assert prepare(folder) != before


def test_a_closed_session_is_remembered_until_its_key_expires(folder, journal, open_journal):
    now = time.time()
    for name in ("a", "b"):
        journal.append(name, {})
    journal.close({"a": now + 60, "b": now - 1})
    assert list((folder / "sessions").iterdir()) == []
    for _ in range(2):
        assert open_journal().closed == {"a": now + 60}


def test_expired_names_of_closed_sessions_are_removed(folder, journal):
    journal.close({f"s{i}": 0.0 for i in range(2000)})
    size = (folder / "closed").stat().st_size
    journal.sweep({"live": time.time() + 60}, {}, time.time(), 60)
    assert (folder / "closed").stat().st_size < size / 100


def test_a_session_that_is_not_resumed_is_removed_when_its_key_expires(folder, journal, open_journal):
    for name in ("resumed", "left"):
        journal.append(name, {})
    again = open_journal()
    again.take("resumed")
    again.sweep({}, {}, time.time() + 40_000, session_key_s=50_000)
    assert len(list((folder / "sessions").iterdir())) == 2
    again.sweep({}, {}, time.time() + 60_000, session_key_s=50_000)
    assert read(again, "resumed")
    assert read(again, "left") == []


def test_the_secret_of_keys_is_derived_from_the_runs_secret_and_differs_from_others(claims):
    secret = "a secret of the settings " * 2
    keys = {key_secret(secret, "run-a"), key_secret(secret, "run-b"), key_secret(secret + "!", "run-a"), secret}
    assert len(keys) == 4
    assert key_secret(secret, "run-a") == key_secret(secret, "run-a")
    assert Sealer(secret)._keys[0].hex() not in keys
    with pytest.raises(KeyRefused, match="bad_signature"):
        verify(key_secret(secret, "run-b"), issue(key_secret(secret, "run-a"), claims()), 0.0)


def test_more_sessions_than_open_files(journal):
    names = [f"session-{number}" for number in range(OPEN_FILES + 2)]
    for i in range(2):
        for name in names:
            journal.append(name, {"i": i})
    assert len(journal._open) == OPEN_FILES
    assert all(read(journal, name) == [{"i": 0}, {"i": 1}] for name in names)


# --- sessions ---------------------------------------------------------------------------------------------


async def test_a_sealed_session_stays_sealed_and_a_revoked_one_revoked(bundle, open_journal, claims):
    def registry() -> SessionRegistry:
        return SessionRegistry(bundle, "m", 50.0, sealer=Sealer(SEAL_SECRET), journal=open_journal())

    first = registry()
    for name in ("sealed", "revoked", "open"):
        session = await first.open(claims(name))
        session.ask(b"lost", is_retry=False)
        session.unanswered.add(b"lost")
    sealed = await first.seal(claims("sealed"))
    await first.revoke(["revoked", "never seen"])
    await first.written(claims("open"))
    again = registry()
    with pytest.raises(ApiError, match="closed"):
        await again.open(claims("sealed"))
    assert await again.seal(claims("sealed")) == sealed
    for name in ("sealed", "revoked", "never seen"):
        with pytest.raises(ApiError, match="closed"):
            await again.open(claims(name))
    assert Trajectory.decode(await again.seal(claims("open"))).unanswered_calls == 1


async def test_the_seconds_until_the_first_call_are_sealed_and_survive_a_restart(bundle, open_journal, claims):
    clock = Clock(1000.0)

    def registry() -> SessionRegistry:
        return SessionRegistry(bundle, "m", 50.0, clock, Sealer(SEAL_SECRET), open_journal())

    def sealed(trajectory: bytes) -> float | None:
        return read_claims(Trajectory.decode(trajectory).seal, SealClaims).first_call_s

    def key(name: str, invoked_at: float):
        return claims(name, expires_at=invoked_at + 50.0)

    # Opening a session, as a request for the length of a prompt does, is no model call.
    earlier = registry()
    first = await earlier.open(key("s", 1000.0))
    clock.now = 1007.0
    for question in (b"first", b"second"):
        first.ask(question, is_retry=False)
        clock.now += 9
    await earlier.written(first.claims)
    again = registry()
    # The session is restored with a key that a restarted trainer made.
    assert sealed(await again.seal(key("s", 1020.0))) == 7.0
    assert sealed(await again.seal(key("never called", 1020.0))) is None


async def test_calls_without_an_answer_take_limited_space(bundle, folder, open_journal, claims):
    registry = SessionRegistry(bundle, "m", 50.0, journal=open_journal())
    few, many = await registry.open(claims("few")), await registry.open(claims("many"))
    for session, calls in ((few, MAX_UNANSWERED // 2), (many, MAX_UNANSWERED * 3)):
        for i in range(calls):
            question = i.to_bytes(16)
            session.ask(question, is_retry=False)
            session.lose(question)
            session.write(journals.dropped(question))
    await registry.written(many.claims)
    assert len(few.unanswered) == MAX_UNANSWERED // 2
    assert len(many.unanswered) == MAX_UNANSWERED + 1
    sizes = sorted(file.stat().st_size for file in (folder / "sessions").iterdir())
    assert sizes[1] < sizes[0] + 100
    again = SessionRegistry(bundle, "m", 50.0, journal=open_journal())
    assert [len((await again.open(claims(name))).unanswered) for name in ("few", "many")] == [0, 1]


async def test_a_session_that_could_not_be_read_is_not_taken_for_a_new_one(bundle, open_journal, claims, monkeypatch):
    first = SessionRegistry(bundle, "m", 50.0, journal=open_journal())
    (await first.open(claims())).ask(b"lost", is_retry=False)
    await first.written(claims())
    again = SessionRegistry(bundle, "m", 50.0, journal=open_journal())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(ApiError, match="Too many open files; retry later"):
            await again.open(claims())
    assert Trajectory.decode(await again.seal(claims())).unanswered_calls == 1


async def test_a_session_is_read_once_beside_the_event_loop(bundle, open_journal, claims, monkeypatch):
    first = SessionRegistry(bundle, "m", 50.0, journal=open_journal())
    for name in ("resumed", "revoked"):
        (await first.open(claims(name))).ask(b"lost", is_retry=False)
    await first.written(claims())
    go, readers, load = threading.Event(), [], SessionJournal.load

    def slow(journal: SessionJournal, session_id: str) -> memoryview:
        readers.append(threading.current_thread())
        go.wait(60)
        return load(journal, session_id)

    monkeypatch.setattr(SessionJournal, "load", slow)
    again = SessionRegistry(bundle, "m", 50.0, journal=open_journal())
    opened = [asyncio.create_task(again.open(claims(name))) for name in ("resumed", "resumed", "revoked")]
    await eventually(lambda: readers)  # the second is read after it, in the same thread
    opened[0].cancel()  # its client disconnected
    revoking = asyncio.create_task(again.revoke(["revoked"]))
    await asyncio.sleep(0)
    go.set()
    await revoking
    _, resumed, revoked = await asyncio.gather(*opened, return_exceptions=True)
    assert resumed.unanswered == {b"lost"}
    assert isinstance(revoked, ApiError)
    assert await again.open(claims("resumed")) is resumed
    assert len(readers) == 2
    assert threading.main_thread() not in readers


async def test_a_closed_session_is_freed_without_a_garbage_collection(bundle, journal, claims):
    registry = SessionRegistry(bundle, "m", 50.0, journal=journal)
    gc.disable()
    try:
        freed = weakref.ref(await registry.open(claims()))
        await registry.seal(claims())
        await registry.revoke(["s"])
        await eventually(lambda: freed() is None)  # the thread that sealed it may not have dropped it yet
    finally:
        gc.enable()


async def test_a_call_in_flight_does_not_reopen_a_revoked_session(bundle, folder, journal, claims):
    registry = SessionRegistry(bundle, "m", 50.0, journal=journal)
    session = await registry.open(claims())
    await registry.revoke(["s"])
    session.write({"kind": "asked", "call": b"c"})
    await registry.written(claims())
    assert list((folder / "sessions").iterdir()) == []


# --- a disk that is full or does not answer ---------------------------------------------------------------


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Path:
    """Where the sessions without a complete journal are noted."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(journal_writer, "_MEMORY", folder)
    monkeypatch.setattr(journal_writer, "_LIMIT_S", 120.0)
    return folder


@pytest.fixture(params=["full", "hangs", "defect"])
def fail(request, memory):
    """`fail(patch, registry)` lets no write of the registry's journal succeed."""
    free = threading.Event()

    def refuse(*_: object) -> None:
        if request.param == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if request.param == "defect":
            raise ValueError("a record that cannot be encoded")
        assert free.wait(120)

    def fail(patch: pytest.MonkeyPatch, registry: SessionRegistry) -> None:
        patch.setattr(registry._journal._disk, "_given_limit_s", 0.05)
        for call in ("append", "close", "report"):
            patch.setattr(SessionJournal, call, refuse)

    yield fail
    free.set()


async def test_sessions_that_the_disk_does_not_take_continue_and_a_later_gateway_refuses_them_alone(
    bundle, open_journal, claims, fail, monkeypatch
):
    stats = GatewayStats()
    first = SessionRegistry(bundle, "m", 50.0, sealer=Sealer(SEAL_SECRET), journal=open_journal(), stats=stats)
    sessions = {name: await first.open(claims(name)) for name in ("whole", "in part", "revoked")}
    for session in sessions.values():
        session.ask(b"one", is_retry=False)
        await first.written(session.claims)
    assert stats.unjournaled == 0
    with monkeypatch.context() as failing:
        fail(failing, first)
        sessions["new"] = await first.open(claims("new"))
        for question in (b"two", b"three"):
            for name in ("in part", "new"):
                sessions[name].ask(question, is_retry=False)
                await first.written(sessions[name].claims)
        await first.revoke(["revoked"])
        assert await first.seal(claims("in part"))
    assert stats.unjournaled == 3
    for _ in range(2):
        again = SessionRegistry(bundle, "m", 50.0, journal=open_journal())
        assert (await again.open(claims("whole"))).unanswered == {b"one"}
        for name in ("in part", "new", "revoked"):
            for use in (again.open, again.seal):
                with pytest.raises(ApiError, match="lost with the journal") as caught:
                    await use(claims(name))
                assert caught.value.status == 410


async def test_once_the_disk_takes_writes_again_new_sessions_have_a_journal(
    bundle, open_journal, claims, memory, monkeypatch
):
    free, stats = threading.Event(), GatewayStats()
    first = SessionRegistry(bundle, "m", 50.0, journal=open_journal(), stats=stats)
    with monkeypatch.context() as hung:
        hung.setattr(first._journal._disk, "_given_limit_s", 0.05)
        hung.setattr(SessionJournal, "append", lambda *_: free.wait(120))
        lost = await first.open(claims("lost"))
        lost.ask(b"one", is_retry=False)
        await first.written(lost.claims)
    free.set()
    await eventually(lambda: not first._journal._disk.hangs)
    kept = await first.open(claims("kept"))
    for session in (kept, lost):
        session.ask(b"two", is_retry=False)
        await first.written(session.claims)
    assert stats.unjournaled == 1
    again = SessionRegistry(bundle, "m", 50.0, journal=open_journal())
    assert (await again.open(claims("kept"))).unanswered == {b"two"}
    # Once no key of the lost session can be valid, nothing is noted of it.
    await again.sweep()
    assert [*memory.iterdir()]
    monkeypatch.setattr(again, "_clock", lambda: time.time() + 60)
    await again.sweep()
    assert not [*memory.iterdir()]


async def test_the_names_of_a_killed_gateway_are_deleted_once_they_expire_and_those_of_a_running_one_are_not(
    bundle, memory, open_journal, claims, monkeypatch
):
    registry = SessionRegistry(bundle, "m", 50.0, journal=open_journal())
    session = await registry.open(claims())
    monkeypatch.setattr(SessionJournal, "append", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    session.ask(b"one", is_retry=False)
    await registry.written(session.claims)
    [noted] = memory.iterdir()
    journal_writer.delete_expired_names(time.time() + 60)
    assert noted.exists()
    registry.close()
    journal_writer.delete_expired_names(time.time())
    assert noted.exists()
    journal_writer.delete_expired_names(time.time() + 60)
    assert not noted.exists()


async def test_a_session_whose_loss_cannot_be_noted_is_closed(
    bundle, memory, open_journal, claims, fail, monkeypatch
):
    memory.rmdir()
    registry = SessionRegistry(bundle, "m", 50.0, journal=open_journal())
    session = await registry.open(claims())
    fail(monkeypatch, registry)
    session.ask(b"one", is_retry=False)
    with pytest.raises(ApiError, match="can neither write the journal") as caught:
        await registry.written(session.claims)
    assert caught.value.status == 503
    with pytest.raises(ApiError, match="closed"):
        await registry.open(claims())


def test_an_answer_waits_for_the_journal_and_no_other_request_does(start, monkeypatch):
    gateway = start(lambda _: "5")
    assert text_of(gateway.post(ask("a"))) == "5"
    go, append, answers = threading.Event(), SessionJournal.append, []

    def slow(*args: object) -> None:
        assert go.wait(120)
        append(*args)

    monkeypatch.setattr(SessionJournal, "append", slow)
    clients = [
        threading.Thread(target=lambda body=body: answers.append(gateway.post(body)))
        for body in (ask("b"), ask("c", stream=True))
    ]
    for client in clients:
        client.start()
    until(lambda: gateway.gateway.stats().calls == 3)
    assert httpx.get(f"{gateway.gateway.url}/health").status_code == 200
    assert gateway.post(ask("a"), path="/v1/messages/count_tokens", session="other").status_code == 200
    assert not answers
    go.set()
    for client in clients:
        client.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    gateway.restart()
    assert len(Trajectory.decode(gateway.seal()).segments) == 3


# --- restarts of a gateway --------------------------------------------------------------------------------


class Restartable:
    """A gateway with a journal, which can be restarted."""

    def __init__(self, serve, folder: Path, engine: ScriptedEngine, **more) -> None:
        self.journal_id, self.engine = prepare(folder), engine
        self._start = lambda: serve(engine.url, journal=folder, seal_secret=SEAL_SECRET, **more)
        self.gateway = self._start()

    def restart(self) -> None:
        self.gateway.stop()
        self.gateway = self._start()

    def post(self, body: dict, headers: dict | None = None, path: str = "/v1/chat/completions", **of_the_key):
        key = self.gateway.key(**{"journal_id": self.journal_id, **of_the_key})
        return self.gateway.post(body, key=key, headers=headers, path=path)

    def seal(self) -> bytes:
        return self.post({}, path="/v1/rollout/trajectory").raise_for_status().content


@pytest.fixture
def start(serve, folder):
    """Start a gateway with a journal before an engine with these replies."""
    with ExitStack() as stack:
        yield lambda replies, folder=folder, **more: Restartable(
            serve, folder, stack.enter_context(ScriptedEngine(replies)), **more
        )


def ask(*said: str, **more) -> dict:
    messages = [(user, assistant)[i % 2](text) for i, text in enumerate(said)]
    return {"model": "scripted", "messages": messages, **more}


def text_of(response: httpx.Response) -> str:
    return response.raise_for_status().json()["choices"][0]["message"]["content"]


def segments_of(sealed: bytes) -> list[dict]:
    """Return what was sampled, without durations and the ids of calls."""
    segments = [segment.model_dump(mode="json") for segment in Trajectory.decode(sealed).segments]
    for turn in (turn for segment in segments for turn in segment["turns"]):
        turn["seconds"] = 0
    return json.loads(re.sub(r"call_\w{24}", "call", json.dumps(segments)))


def test_a_session_continues_after_a_restart_exactly_as_without_one(start, tmp_path):
    tool = function_tool("look")
    own_way = '<tool_call>\n{"name":"look",   "arguments":{}}\n</tool_call>'  # no template writes it so

    def converse(gateway: Restartable, between) -> bytes:
        messages = [user("Begin.")]
        for nth in range(3):
            body = {"model": "scripted", "messages": messages, "tools": [tool], "n": 2 if nth == 1 else 1}
            reply = gateway.post(body).raise_for_status().json()["choices"][0]["message"]
            messages += [reply, *(tool_result(call["id"], "nothing") for call in reply.get("tool_calls") or ())]
            messages.append(user("And then?"))
            between()
        gateway.post(ask("Quite another thing: \ud83d", logprobs=True))
        gateway.post(ask("Once more \U0001f600", logprobs=True)).raise_for_status()
        between()
        sealed = gateway.seal()
        between()
        assert gateway.seal() == sealed
        return sealed

    seen = []
    for name in ("calm", "restarted"):
        gateway = start([own_way, "two", "three", "four", "five", "six"], tmp_path / name / "0-of-1")
        sealed = converse(gateway, gateway.restart if name == "restarted" else lambda: None)
        seen.append((segments_of(sealed), [request["input_ids"] for request in gateway.engine.requests]))
    assert seen[0] == seen[1]
    segments, prompts = seen[0]
    assert [segment["split_reason"] for segment in segments][:2] == ["first_call", "branched"]
    assert len(prompts) >= 5


def test_a_retry_after_a_restart_gets_the_recorded_answer(start):
    numbers = iter(range(1, 100))
    gateway = start(lambda _: str(next(numbers)))
    first = gateway.post(ask("Say something."))
    key = {"Idempotency-Key": "k"}
    keyed = gateway.post(ask("Say something."), key)
    gateway.restart()
    assert gateway.post(ask("Say something."), RETRY).json() == first.json()
    assert gateway.post(ask("Say something."), key).json() == keyed.json()
    streamed = gateway.post(ask("Say something else.", stream=True))
    gateway.restart()
    repeated = gateway.post(ask("Say something else.", stream=True), RETRY)
    assert '"content":"3"' in streamed.text.replace(": ", ":")
    assert '"content":"3"' in repeated.text.replace(": ", ":")
    assert text_of(gateway.post(ask("Say something."))) == "4"  # not declared as a retry
    assert len(Trajectory.decode(gateway.seal()).segments) == 4


def test_a_retry_after_a_restart_gets_no_answer_of_an_earlier_equal_question(start):
    replies = iter(["1", Fail(500), "2", "3"])
    gateway = start(lambda _: next(replies), engine_attempts=1)
    assert text_of(gateway.post(ask("Summarise."))) == "1"
    assert gateway.post(ask("Summarise.")).status_code == 503
    gateway.restart()
    assert text_of(gateway.post(ask("Summarise."), RETRY)) == "2"
    gateway.restart()
    assert text_of(gateway.post(ask("Summarise."), RETRY)) == "2"


def test_a_sessions_budget_continues_after_a_restart(start):
    gateway = start(["12345", "12345", "12345"], gateway={"session_tokens": 9})
    assert text_of(gateway.post(ask("a"))) == "12345"  # and the end of the turn: 6 tokens
    gateway.restart()
    assert text_of(gateway.post(ask("b"))) == "123"
    gateway.restart()
    assert gateway.post(ask("c")).status_code == 400


def test_messages_take_limited_space_also_if_they_are_not_rendered(start):
    gateway = start(lambda _: "5", max_result_bytes=2000)
    result = {"role": "tool", "tool_call_id": "x" * 5000, "content": "1"}
    for n, status in enumerate([200, 200, 400, 400]):
        assert gateway.post({"model": "scripted", "messages": [result, user(f"{n}")]}).status_code == status
        gateway.restart()


def test_unanswered_calls_are_counted_until_they_are_answered(start):
    down = True
    gateway = start(lambda _: Fail(500) if down else "up", engine_attempts=1)
    assert gateway.post(ask("a")).status_code == 503
    assert gateway.post(ask("b")).status_code == 503
    assert gateway.post({"model": "scripted", "messages": [{"role": "other", "content": "c"}]}).status_code == 400
    gateway.restart()
    down = False
    assert text_of(gateway.post(ask("a"), RETRY)) == "up"
    assert Trajectory.decode(gateway.seal()).unanswered_calls == 1


def test_what_is_left_out_of_training_is_so_after_a_restart(start):
    gateway = start(lambda _: "5", leave_out=[{"header": "x-side"}])
    text_of(gateway.post(ask("a")))
    text_of(gateway.post(ask("b"), {"X-Side": "1"}))
    gateway.restart()
    (segment,) = Trajectory.decode(gateway.seal()).segments
    assert [message["content"] for message in segment.messages] == ["a", "5"]


@pytest.mark.parametrize("failed_before", [0, 1])
def test_a_call_that_the_agent_gave_up_needs_no_answer_after_a_restart(start, held, failed_before):
    """If the same question failed before, that attempt still needs one."""
    fails = iter([Fail(500)] * failed_before)
    gateway = start(lambda prompt: next(fails, None) or held(prompt), engine_attempts=1)
    for _ in range(failed_before):
        assert gateway.post(ask("a")).status_code == 503
    key = gateway.gateway.key(journal_id=gateway.journal_id)
    hang_up(gateway.gateway.url, key, ask("a"), lambda: held.asked.acquire(timeout=120))
    until(lambda: gateway.gateway.stats().client_disconnects == 1)
    until(lambda: gateway.gateway.stats().calls_in_flight == 0)
    held.go.set()
    gateway.restart()
    assert Trajectory.decode(gateway.seal()).unanswered_calls == failed_before


def test_a_session_of_a_lost_journal_is_refused(start, folder, tmp_path):
    gateway = start(["one", "two"])
    text_of(gateway.post(ask("a")))
    gateway.gateway.stop()
    folder.rename(tmp_path / "lost")
    after = start(["one", "two"])
    assert after.journal_id != gateway.journal_id
    refused = after.post(ask("a", "one", "b"), journal_id=gateway.journal_id)
    assert refused.status_code == 410
    assert refused.json()["error"]["code"] == "session_lost"
    anthropic = after.post({}, path="/v1/messages", journal_id=gateway.journal_id).json()
    assert anthropic["type"] == "error"
    assert "lost" in anthropic["error"]["message"]
    assert after.post({}, path="/v1/rollout/trajectory", journal_id=gateway.journal_id).status_code == 410
    assert after.post(ask("a"), session="new").status_code == 200
