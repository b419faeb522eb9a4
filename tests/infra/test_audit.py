"""The audit of pinned versions, with a local service of known vulnerabilities."""

import json
import subprocess
import sys

import pytest

from stub_server import Request, StubServer

JINJA2 = {"jinja2": "CVE-2019-10906"}  # every service knows it; one that does not has no data
NOWHERE = ("--osv-url", "http://127.0.0.1:9/")
NOT_AUDITED = "NOT AUDITED: no service could be asked"


@pytest.mark.parametrize(
    ("known", "arguments", "code", "words"),
    [
        pytest.param(
            JINJA2,
            ("--required",),
            0,
            "2 pinned versions looked up: 0 known vulnerabilities\n",
            marks=pytest.mark.slow,
        ),
        ({**JINJA2, "two": "CVE-2026-1"}, (), 1, "two 2.0: CVE-2026-1 (), fixed in no version yet"),
        pytest.param({}, (), 0, NOT_AUDITED, marks=pytest.mark.slow),
        ({}, (*NOWHERE, "--required"), 3, NOT_AUDITED),
    ],
    ids=["nothing known", "a known vulnerability", "a service without data", "no service"],
)
def test_known_vulnerabilities_and_versions_that_were_not_looked_up_are_reported(
    known, arguments, code, words, tmp_path, repository
):
    def osv(request: Request) -> tuple[int, bytes]:
        package = json.loads(request.body)["package"]
        name = known.get(package["name"])
        found = {"vulns": [{"id": name, "summary": "bad", "affected": [{"package": package}]}]} if name else {}
        return 200, json.dumps(found).encode()

    pins = tmp_path / "pins.txt"
    pins.write_text("one==1.0\ntwo==2.0 ; python_version >= '3'\n")
    with StubServer(osv) as server:
        command = [sys.executable, str(repository / "constraints" / "audit.py"), "--service", "osv"]
        url = () if "--osv-url" in arguments else ("--osv-url", f"{server.url}/v1/query")
        argv = [*command, *url, *arguments, str(pins)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    output = done.stdout + done.stderr
    assert (done.returncode, words in output) == (code, True), output
    assert words != NOT_AUDITED or "0 known vulnerabilities" not in output
