"""What outlives a gateway: its sessions, as they were, and nobody else's."""

import json
import os
import time
from pathlib import Path

import httpx
import pytest

from agent_wrapper.contract import Trajectory
from rollout_backend.core.api_error import ApiError
from rollout_backend.core.seal import Sealer
from rollout_backend.core.session_key import KeyRefused, issue, verify
from rollout_backend.errors import ConfigError
from rollout_backend.gateway import journal as journals
from rollout_backend.gateway.journal import SessionJournal
from rollout_backend.gateway.session_registry import SessionRegistry
from rollout_backend.local.scripted import Fail, ScriptedEngine
from rollout_backend.serving.run_secret import key_secret

SEAL_SECRET = "the seals of this run " * 2
RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "gateway" / "0-of-1"
    journals.prepare(folder)
    return folder


def let_go(journal: SessionJournal) -> None:
    """As its process's death does."""
    journal.release()


def session_file(folder: Path) -> Path:
    [path] = (folder / "sessions").iterdir()
    return path


# --- the files --------------------------------------------------------------------------------------------


def test_what_was_written_is_read_again_in_order(folder):
    journal = SessionJournal(folder)
    records = [{"kind": "asked", "call": bytes([i])} for i in range(3)]
    for record in records:
        journal.append("s", record)
    journal.append("other", {"kind": "x"})
    let_go(journal)
    again = SessionJournal(folder)
    assert again.read("s") == records
    assert again.read("never") == []
    let_go(again)


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_record_cut_off_is_dropped_and_what_follows_it_is_read(folder, cut):
    journal = SessionJournal(folder)
    for i in range(3):
        journal.append("s", {"i": i})
    path = session_file(folder)
    os.truncate(path, path.stat().st_size - cut)
    assert journal.read("s") == [{"i": 0}, {"i": 1}]
    journal.append("s", {"i": 3})
    assert journal.read("s") == [{"i": 0}, {"i": 1}, {"i": 3}]
    let_go(journal)


def test_a_record_with_another_content_is_dropped(folder):
    journal = SessionJournal(folder)
    journal.append("s", {"i": 0})
    journal.append("s", {"i": 1})
    path = session_file(folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert journal.read("s") == [{"i": 0}]
    let_go(journal)


def test_a_write_that_fails_leaves_no_half_a_record(folder, monkeypatch):
    journal = SessionJournal(folder)
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
    assert journal.read("s") == [{"i": 0}, {"i": 2}]
    let_go(journal)


def test_nobody_else_may_look_into_it(folder):
    journal = SessionJournal(folder)
    journal.append("s", {})
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert (folder / "sessions").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o600}
    let_go(journal)
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        journals.prepare(folder)


def test_two_gateways_never_write_to_one_folder(folder):
    journal = SessionJournal(folder)
    with pytest.raises(ConfigError, match="another gateway uses"):
        SessionJournal(folder)
    with pytest.raises(ConfigError, match="another gateway uses"):
        journals.prepare(folder, wait_s=0.0)
    let_go(journal)
    let_go(SessionJournal(folder))


@pytest.mark.parametrize("part", ["sessions", "closed", "journal_id"])
def test_a_folder_that_lacks_a_part_is_another_journal(folder, part):
    before = journals.prepare(folder)
    assert journals.prepare(folder) == before
    path = folder / part
    path.rmdir() if path.is_dir() else path.unlink()
    assert journals.prepare(folder) != before


def test_what_is_closed_keeps_its_name_alone_until_no_key_can_be_valid(folder):
    journal, now = SessionJournal(folder), time.time()
    for name in ("a", "b"):
        journal.append(name, {})
    journal.close({"a": now + 60, "b": now - 1})
    assert list((folder / "sessions").iterdir()) == []
    let_go(journal)
    again = SessionJournal(folder)
    assert again.closed == {"a": now + 60}
    let_go(again)
    again = SessionJournal(folder)
    assert again.closed == {"a": now + 60}
    let_go(again)


def test_names_that_have_expired_do_not_pile_up(folder):
    journal = SessionJournal(folder)
    journal.close({f"s{i}": 0.0 for i in range(2000)})
    size = (folder / "closed").stat().st_size
    journal.sweep({"live": time.time() + 60}, time.time(), 60)
    assert (folder / "closed").stat().st_size < size / 100
    let_go(journal)


def test_what_nobody_came_back_for_goes_when_its_key_has_expired(folder):
    journal = SessionJournal(folder)
    for name in ("taken up", "left"):
        journal.append(name, {})
    let_go(journal)
    again = SessionJournal(folder)
    again.read("taken up")
    again.sweep({}, time.time() + 49, token_s=50)
    assert len(list((folder / "sessions").iterdir())) == 2
    again.sweep({}, time.time() + 51, token_s=50)
    assert again.read("taken up")
    assert again.read("left") == []
    let_go(again)


def test_the_keys_secret_follows_from_the_runs_and_is_no_other_secret(claims):
    secret = "a secret of the settings " * 2
    keys = {key_secret(secret, "run-a"), key_secret(secret, "run-b"), key_secret(secret + "!", "run-a"), secret}
    assert len(keys) == 4
    assert key_secret(secret, "run-a") == key_secret(secret, "run-a")
    assert Sealer(secret)._key.hex() not in keys
    with pytest.raises(KeyRefused, match="bad_signature"):
        verify(key_secret(secret, "run-b"), issue(key_secret(secret, "run-a"), claims()), 0.0)


# --- sessions ---------------------------------------------------------------------------------------------


async def test_a_sealed_session_stays_sealed_and_a_revoked_one_revoked(bundle, folder, claims):
    def registry() -> SessionRegistry:
        return SessionRegistry(bundle, "m", 50.0, sealer=Sealer(SEAL_SECRET), journal=SessionJournal(folder))

    first = registry()
    for name in ("sealed", "revoked", "open"):
        session = first.open(claims(name)).state
        session.write({"kind": "asked", "call": b"lost"})
        session.unanswered.add(b"lost")
    sealed = await first.seal(claims("sealed"))
    await first.revoke(["revoked", "never seen"])
    let_go(first._journal)
    again = registry()
    with pytest.raises(ApiError, match="closed"):
        again.open(claims("sealed"))
    assert await again.seal(claims("sealed")) == sealed
    for name in ("sealed", "revoked", "never seen"):
        with pytest.raises(ApiError, match="closed"):
            again.open(claims(name))
    assert Trajectory.decode(await again.seal(claims("open"))).unanswered_calls == 1
    let_go(again._journal)


async def test_a_session_that_cannot_be_written_down_is_over(bundle, folder, claims):
    registry = SessionRegistry(bundle, "m", 50.0, journal=SessionJournal(folder))
    session = registry.open(claims()).state
    (folder / "sessions").rmdir()
    with pytest.raises(ApiError, match="cannot write the journal") as caught:
        session.write({})
    assert caught.value.status == 503
    with pytest.raises(ApiError, match="closed"):
        registry.open(claims())
    let_go(registry._journal)


async def test_a_call_under_way_brings_no_revoked_session_back(bundle, folder, claims):
    registry = SessionRegistry(bundle, "m", 50.0, journal=SessionJournal(folder))
    session = registry.open(claims()).state
    await registry.revoke(["s"])
    session.write({"kind": "asked", "call": b"c"})
    assert list((folder / "sessions").iterdir()) == []
    let_go(registry._journal)


# --- a gateway that is started again ----------------------------------------------------------------------


class Life:
    """A gateway on a folder, which can end and come back."""

    def __init__(self, serve, folder: Path, engine_url: str, **more) -> None:
        self.journal_id = journals.prepare(folder)
        self._start = lambda: serve(engine_url, journal=folder, seal_secret=SEAL_SECRET, **more)
        self.gateway = self._start()

    def again(self) -> None:
        self.gateway.stop()
        self.gateway = self._start()

    def post(self, body: dict, headers: dict | None = None, path: str = "/v1/chat/completions", **of_the_key):
        key = self.gateway.key(**{"journal_id": self.journal_id, **of_the_key})
        headers = {"Authorization": f"Bearer {key}", **(headers or {})}
        return httpx.post(self.gateway.url + path, content=json.dumps(body).encode(), headers=headers, timeout=30)

    def seal(self, **of_the_key) -> bytes:
        return self.post({}, path="/v1/rollout/trajectory", **of_the_key).raise_for_status().content


@pytest.fixture
def start(serve, folder):
    return lambda engine, folder=folder, **more: Life(serve, folder, engine.url, **more)


def ask(*said: str, **more) -> dict:
    messages = [{"role": ["user", "assistant"][i % 2], "content": text} for i, text in enumerate(said)]
    return {"model": "scripted", "messages": messages, **more}


def text_of(response: httpx.Response) -> str:
    return response.raise_for_status().json()["choices"][0]["message"]["content"]


def segments_of(sealed: bytes) -> list[dict]:
    """What was sampled, without what no two runs have in common: how long it took."""
    segments = [segment.model_dump(mode="json") for segment in Trajectory.decode(sealed).segments]
    for turn in (turn for segment in segments for turn in segment["turns"]):
        turn["seconds"] = 0
    return segments


@pytest.mark.parametrize("restarts", [True, False])
def test_a_session_goes_on_as_if_nothing_had_been(start, tmp_path, restarts):
    def converse(life: Life, between) -> bytes:
        said = ["Begin."]
        for nth in range(3):
            said += [text_of(life.post(ask(*said, n=2 if nth == 1 else 1))), "And then?"]
            between()
        life.post(ask("Quite another thing: \ud83d", logprobs=True))
        life.post(ask("Once more \U0001f600", logprobs=True)).raise_for_status()
        between()
        sealed = life.seal()
        between()
        assert life.seal() == sealed
        return sealed

    seen = []
    for name, again in (("calm", False), ("restarted", restarts)):
        with ScriptedEngine(["one", "two", "three", "four", "five", "six"]) as engine:
            life = start(engine, tmp_path / name / "0-of-1")
            sealed = converse(life, life.again if again else lambda: None)
            seen.append((segments_of(sealed), [request["input_ids"] for request in engine.requests]))
    assert seen[0] == seen[1]
    segments, prompts = seen[0]
    assert [segment["split_reason"] for segment in segments][:2] == ["first_call", "branched"]
    assert len(prompts) >= 5


def test_what_was_sampled_is_gone_on_from_and_not_rendered_anew(start):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    own_way = '<tool_call>\n{"name":"look",   "arguments":{}}\n</tool_call>'  # no template writes it so
    with ScriptedEngine([own_way, "seen"]) as engine:
        life = start(engine)
        messages = [{"role": "user", "content": "Look."}]
        first = life.post({"model": "scripted", "messages": messages, "tools": [tool]}).json()
        reply = first["choices"][0]["message"]
        life.again()
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "nothing"}
        body = {"model": "scripted", "messages": [*messages, reply, result], "tools": [tool]}
        assert text_of(life.post(body)) == "seen"
        [segment] = Trajectory.decode(life.seal()).segments
        assert len(segment.turns) == 2


def test_more_sessions_than_files_may_be_open(folder, monkeypatch):
    monkeypatch.setattr(journals, "OPEN_FILES", 2)
    journal = SessionJournal(folder)
    for i in range(3):
        for name in ("a", "b", "c", "d"):
            journal.append(name, {"i": i})
    assert len(journal._open) == 2
    assert all(journal.read(name) == [{"i": i} for i in range(3)] for name in ("a", "b", "c", "d"))
    let_go(journal)


def test_an_answered_call_that_is_made_again_gets_its_answer(start):
    numbers = iter(range(1, 100))
    with ScriptedEngine(lambda _: str(next(numbers))) as engine:
        life = start(engine)
        first = life.post(ask("Say something."))
        key = {"Idempotency-Key": "k"}
        keyed = life.post(ask("Say something."), key)
        life.again()
        assert life.post(ask("Say something."), RETRY).json() == first.json()
        assert life.post(ask("Say something."), key).json() == keyed.json()
        streamed = life.post(ask("Say something else.", stream=True))
        life.again()
        repeated = life.post(ask("Say something else.", stream=True), RETRY)
        assert '"content":"3"' in streamed.text.replace(": ", ":")
        assert '"content":"3"' in repeated.text.replace(": ", ":")
        assert text_of(life.post(ask("Say something."))) == "4"  # nobody said that this is a repetition
        assert len(Trajectory.decode(life.seal()).segments) == 4


def test_budgets_go_on_where_they_were(start):
    with ScriptedEngine(["12345", "12345", "12345"]) as engine:
        life = start(engine, gateway={"session_tokens": 9})
        assert text_of(life.post(ask("a"))) == "12345"  # and the end of the turn: 6 tokens
        life.again()
        assert text_of(life.post(ask("b"))) == "123"
        life.again()
        assert life.post(ask("c")).status_code == 400


def test_calls_that_nobody_answered_are_counted_until_they_are(start):
    down = True
    with ScriptedEngine(lambda _: Fail(500) if down else "up") as engine:
        life = start(engine, engine_attempts=1)
        assert life.post(ask("a")).status_code == 503
        assert life.post(ask("b")).status_code == 503
        assert life.post({"model": "scripted", "messages": [{"role": "nobody", "content": "c"}]}).status_code == 400
        life.again()
        down = False
        assert text_of(life.post(ask("a"), RETRY)) == "up"
        assert Trajectory.decode(life.seal()).unanswered_calls == 1


def test_a_session_of_a_lost_journal_is_refused_and_not_begun_anew(start, folder, tmp_path):
    with ScriptedEngine(["one", "two"]) as engine:
        life = start(engine)
        text_of(life.post(ask("a")))
        life.gateway.stop()
        folder.rename(tmp_path / "lost")
        after = start(engine)
        assert after.journal_id != life.journal_id
        refused = after.post(ask("a", "one", "b"), journal_id=life.journal_id)
        assert refused.status_code == 410
        assert refused.json()["error"]["code"] == "session_lost"
        anthropic = after.post({}, path="/v1/messages", journal_id=life.journal_id).json()
        assert anthropic["type"] == "error"
        assert "lost" in anthropic["error"]["message"]
        assert after.post({}, path="/v1/rollout/trajectory", journal_id=life.journal_id).status_code == 410
        assert after.post(ask("a"), session="new").status_code == 200
