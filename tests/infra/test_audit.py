"""The audit of pinned versions, against a service of known vulnerabilities on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

VULNERABLE = {"jinja2": "CVE-2019-10906"}
Audit = Callable[..., tuple[int, str]]


@pytest.fixture
def known() -> dict[str, str]:
    """The known vulnerability of each package's version."""
    return dict(VULNERABLE)


@pytest.fixture
def service(known: dict[str, str]) -> Iterator[str]:
    class Osv(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            package = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["package"]
            answer = {}
            if name := known.get(package["name"]):
                answer = {"vulns": [{"id": name, "summary": "bad", "affected": [{"package": package}]}]}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Osv)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def audit(service: str, tmp_path: Path, repository: Path) -> Audit:
    pins = tmp_path / "pins.txt"
    pins.write_text("one==1.0\ntwo==2.0 ; python_version >= '3'\n")

    def run(*more: str) -> tuple[int, str]:
        command = [sys.executable, str(repository / "constraints" / "audit.py"), "--service", "osv"]
        where = more if "--osv-url" in more else ("--osv-url", service, *more)
        done = subprocess.run([*command, *where, str(pins)], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    return run


def test_pins_without_a_known_vulnerability_pass(audit: Audit) -> None:
    code, output = audit("--required")
    assert (code, output) == (0, "2 pinned versions looked up: 0 known vulnerabilities\n")


def test_a_known_vulnerability_fails_and_is_named(audit: Audit, known: dict[str, str]) -> None:
    known["two"] = "CVE-2026-1"
    code, output = audit()
    assert code == 1
    assert "two 2.0: CVE-2026-1 (), mended in no version yet" in output


@pytest.mark.parametrize(("more", "code"), [((), 0), (("--required",), 3)])
def test_versions_that_could_not_be_looked_up_fail_the_audit(
    audit: Audit, known: dict[str, str], more: tuple[str, ...], code: int
) -> None:
    known.clear()
    for where in ((), ("--osv-url", "http://127.0.0.1:9/")):  # a service without data, and one that is unreachable
        output = audit(*where, *more)
        assert output[0] == code
        assert "NOT AUDITED: no service could be asked" in output[1]
        assert "0 known vulnerabilities" not in output[1]
