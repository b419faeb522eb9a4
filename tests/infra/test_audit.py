"""The audit of pinned versions, with a local service of known vulnerabilities."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stub_server import Request, StubServer

Audit = Callable[..., tuple[int, str]]


@pytest.fixture
def known() -> dict[str, str]:
    """The known vulnerability of each package."""
    return {"jinja2": "CVE-2019-10906"}


@pytest.fixture
def service(known: dict[str, str]) -> Iterator[str]:
    def osv(request: Request) -> tuple[int, bytes]:
        package = json.loads(request.body)["package"]
        name = known.get(package["name"])
        found = {"vulns": [{"id": name, "summary": "bad", "affected": [{"package": package}]}]} if name else {}
        return 200, json.dumps(found).encode()

    with StubServer(osv) as server:
        yield f"{server.url}/v1/query"


@pytest.fixture
def audit(service: str, tmp_path: Path, repository: Path) -> Audit:
    pins = tmp_path / "pins.txt"
    pins.write_text("one==1.0\ntwo==2.0 ; python_version >= '3'\n")

    def run(*more: str) -> tuple[int, str]:
        command = [sys.executable, str(repository / "constraints" / "audit.py"), "--service", "osv"]
        where = more if "--osv-url" in more else ("--osv-url", service, *more)
        done = subprocess.run([*command, *where, str(pins)], capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_pins_without_a_known_vulnerability_pass(audit: Audit) -> None:
    code, output = audit("--required")
    assert (code, output) == (0, "2 pinned versions looked up: 0 known vulnerabilities\n")


def test_a_known_vulnerability_fails_and_is_named(audit: Audit, known: dict[str, str]) -> None:
    known["two"] = "CVE-2026-1"
    code, output = audit()
    assert code == 1
    assert "two 2.0: CVE-2026-1 (), fixed in no version yet" in output


NOWHERE = ("--osv-url", "http://127.0.0.1:9/")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param((), 0, marks=pytest.mark.slow),  # the service answers, but has no data
        ((*NOWHERE, "--required"), 3),
    ],
)
def test_versions_that_could_not_be_looked_up_fail_the_audit(audit, known, arguments, code) -> None:
    known.clear()
    found, output = audit(*arguments)
    assert found == code
    assert "NOT AUDITED: no service could be asked" in output
    assert "0 known vulnerabilities" not in output
