"""The verifier's container: what it scores, and what it reports."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_wrapper.contract import Artifact, pack_artifacts
from agent_wrapper.contract.messages import ORDER, TESTS, VerifierOrder
from agent_wrapper.shared.workspace import WORKSPACE, pack_folder
from agent_wrapper.verifier import MAX_MESSAGE_BYTES, main
from stub_server import StubServer


class Verifier:
    """A verifier's container whose root and working directory are folders, and what S3 answers it."""

    def __init__(self, path: Path) -> None:
        self.root, self.app, self.given = path / "root", path / "root" / "app", path / "given"
        self._message, self._tests, self._left = path / "message", path / "tests", path / "left"
        for each in (self.app, self.given, self._tests, self._left):
            each.mkdir(parents=True)
        (self.app / "old.txt").write_text("of the image")
        (self.app / "old").mkdir()
        (self._left / "new.txt").write_text("of the agent")
        self.files = {WORKSPACE: pack_folder(self._left)}
        self.answer = (200, pack_artifacts(self.files))
        self.url = ""

    def run(self, script: str, timeout_s: float = 300.0, **env: str) -> tuple[int, str]:
        (self._tests / "test.sh").write_text(script.replace("/logs", f"{self.root}/logs"))
        order = VerifierOrder(
            artifacts_url=f"{self.url}/artifacts",
            artifacts=[Artifact.of(name, data) for name, data in self.files.items()],
            timeout_s=timeout_s,
            env=env,
        )
        (self.given / ORDER).write_text(order.model_dump_json())
        (self.given / TESTS).write_bytes(pack_folder(self._tests))
        code = main(self.given, root=self.root, message=self._message)
        return code, self._message.read_text()


@pytest.fixture
def verifier(tmp_path, monkeypatch) -> Iterator[Verifier]:
    found = Verifier(tmp_path)
    monkeypatch.chdir(found.app)
    with StubServer(lambda request: found.answer) as server:
        found.url = server.url
        yield found


def test_the_tests_find_what_the_agent_left_and_all_that_they_write_is_reported(verifier):
    (verifier.root / "tests").mkdir()
    (verifier.root / "tests" / "stale").touch()
    script = (
        'test "$(ls)$MODE" = new.txtstrict && cd /logs/verifier && ls ../../tests > seen && '
        """echo '{"reward": 1, "passed": 3}' > reward.json; exit 2"""
    )
    code, message = verifier.run(script, MODE="strict")
    assert (code, json.loads(message)) == (0, {"reward": 1, "passed": 3})
    assert (verifier.root / "logs" / "verifier" / "seen").read_text() == "test.sh\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo broken; exit 4",
            "wrote no /logs/verifier/reward.json or reward.txt (tests/test.sh exited with 4: broken)",
        ),
        ("sleep 600", "took longer than verifier.timeout_sec=0.3"),
        (
            'printf \'{"reward": 1, "x": "%5000s"}\' y > /logs/verifier/reward.json',
            "reward.json has more than 4096 bytes",
        ),
        ("echo '{\"reward\": NaN}' > /logs/verifier/reward.json", "not JSON compliant"),
    ],
)
def test_without_a_reward_the_message_says_why(verifier, script, message):
    code, found = verifier.run(script, timeout_s=0.3 if "sleep" in script else 300.0)
    assert code == 1
    assert message in found
    assert len(found.encode()) <= MAX_MESSAGE_BYTES


def test_artifacts_that_are_others_or_missing_are_refused(verifier, monkeypatch):
    monkeypatch.setattr("agent_wrapper.verifier._DOWNLOAD_S", 1.0)
    verifier.answer = (200, pack_artifacts({WORKSPACE: b"other"}))
    assert verifier.run("true")[0] == 1
    verifier.answer = (403, b"<Code>AccessDenied</Code>")
    code, message = verifier.run("true")
    assert code == 1
    assert "S3 answered 403 AccessDenied" in message
    verifier.files = {"log.txt": b"x"}
    verifier.answer = (200, pack_artifacts(verifier.files))
    assert "no artifact 'workspace.tar.gz'" in verifier.run("true")[1]
    verifier.url = "http://s3:port"
    assert "InvalidURL" in verifier.run("true")[1]
    assert (verifier.app / "old.txt").exists()


def test_the_root_is_no_workspace(verifier, monkeypatch):
    monkeypatch.setattr(Path, "cwd", lambda: Path("/"))
    code, message = verifier.run("true")
    assert code == 1
    assert "working directory is /: set WORKDIR" in message
