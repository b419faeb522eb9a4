"""Looks every pinned version up among the known vulnerabilities: `make audit`.

What must always hold: what could not be looked up never passes for clean. So a service is first asked for a version
that is known to be vulnerable, and one that does not know it is not believed.

Exit codes: 0, no vulnerability is known, or, without --required, nothing could be looked up, which is said; 1, there
are some, and which; 3, with --required, not all could be looked up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PINS = sorted(Path(__file__).parent.glob("*.txt"))
KNOWN = "jinja2==2.10"  # CVE-2019-10906, and others
ACCEPTED: dict[str, str] = {}  # by a vulnerability's id, why it does no harm here


class NotAnswered(Exception):
    """A service could not be asked. The message says why."""


def look_up(files: Iterable[Path], service: Sequence[str]) -> list[dict[str, Any]]:
    """Return what a service knows about each pin. Raises NotAnswered."""
    command = [
        *(sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format", "json"),
        *("--progress-spinner", "off", *service),
        *(f"--requirement={file}" for file in files),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        why = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise NotAnswered(why[-1][:300]) from None
    return found


def ask(files: Sequence[Path], service: Sequence[str]) -> list[dict[str, Any]]:
    """The same, from a service that knows what it should. Raises NotAnswered."""
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "known.txt"
        known.write_text(f"{KNOWN}\n")
        [answer] = look_up([known], service)
    if not answer.get("vulns"):
        raise NotAnswered(f"of {KNOWN} it knows no vulnerability: {answer.get('skip_reason', 'and should')}")
    return look_up(files, service)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--required", action="store_true", help="fail where not all could be looked up")
    parser.add_argument("--service", choices=["pypi", "osv"], action="append", help="to ask; default: each in turn")
    parser.add_argument("--osv-url", help="of another OSV than the public one")
    parser.add_argument("files", nargs="*", type=Path, default=PINS)
    options = parser.parse_args()
    for name in options.service or ["pypi", "osv"]:
        url = ("--osv-url", options.osv_url) if name == "osv" and options.osv_url else ()
        try:
            pins = ask(options.files, ("--vulnerability-service", name, *url))
            break
        except NotAnswered as error:
            print(f"{name} could not be asked: {error}")
    else:
        print("NOT AUDITED: no service could be asked, so nothing is known of the pinned versions.")
        return 3 if options.required else 0
    skipped = [pin for pin in pins if "skip_reason" in pin]
    known = [(pin, one) for pin in pins for one in pin.get("vulns", ())]
    bad = [(pin, one) for pin, one in known if not ACCEPTED.keys() & {one["id"], *one["aliases"]}]
    for pin, one in bad:
        fixed = ", ".join(one["fix_versions"]) or "no version yet"
        print(f"{pin['name']} {pin['version']}: {one['id']} ({', '.join(one['aliases'])}), fixed in {fixed}")
    for pin in skipped:
        print(f"NOT AUDITED: {pin['name']}: {pin['skip_reason']}")
    print(f"{len(pins) - len(skipped)} pinned versions looked up: {len(bad)} known vulnerabilities")
    return 1 if bad else 3 if skipped and options.required else 0


if __name__ == "__main__":
    sys.exit(main())
