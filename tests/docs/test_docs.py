"""The pages name what exists: commands, options, settings, reasons, links."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

from rollout_backend import errors
from rollout_backend.cli import app
from rollout_backend.config import load_config

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "infra" / "README.md"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_commands_and_their_options_exist() -> None:
    found = 0
    for page in PAGES:
        for line in "\n".join(blocks(page, "sh")).splitlines():
            if not line.startswith("rollout "):
                continue
            words = shlex.split(line, comments=True)
            found += 1
            command = typer.main.get_command(app)
            context = typer.Context(command)
            rest = words[1:]
            while hasattr(command, "get_command"):
                command = command.get_command(context, rest.pop(0))
                assert command is not None, line
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in rest if word.startswith("-")} <= known, line
    assert found >= 4


def test_configs_can_be_loaded(tmp_path: Path) -> None:
    configs = [text for page in PAGES for text in blocks(page, "yaml")]
    assert configs
    for text in configs:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        load_config(path, env={}, base={"model": {"path": "/the/trainer/knows"}})  # under verl it is not said twice


def test_settings_that_pages_name_exist() -> None:
    settings = set(re.findall(r"^\| `([a-z_.]+)` \|", (ROOT / "docs" / "settings.md").read_text(), flags=re.M))
    sections = {name.partition(".")[0] for name in settings if "." in name}
    for page in PAGES:
        for name in re.findall(r"`([a-z]+\.[a-z_]+)(?:: [^`]*|=[^`]*)?`", page.read_text()):
            if name.partition(".")[0] in sections and not name.endswith((".py", ".yaml")):
                assert name in settings, f"{page.name} names {name}"


def test_every_reason_is_explained() -> None:
    sources = "\n".join(
        path.read_text()
        for package in ("agent_wrapper", "rollout_backend")
        for path in (ROOT / package).rglob("*.py")
    )
    outcomes = r"Outcome\.(?:AGENT_ERROR|INFRA_ERROR|TIMED_OUT|CANCELLED),\s*\"([a-z_]+)\""
    others = (
        r"(?:Cancellation\(\w+, |_settle_open\(|\braise Rejected\([^)]*reason=|Rejected\(text, reason=)\"([a-z_]+)\""
    )
    reasons = set(re.findall(outcomes, sources)) | set(re.findall(others, sources))
    reasons |= {kind.reason for kind in vars(errors).values() if isinstance(getattr(kind, "reason", None), str)}
    assert len(reasons) > 20
    explained = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "run-rollouts.md").read_text()))
    assert reasons - explained == set()


def test_the_page_of_settings_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs" / "make_settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run `python docs/make_settings.py`"


def test_every_setting_is_described() -> None:
    blank = re.findall(r"^\| `([a-z_.]+)` \|.*\|  \|$", (ROOT / "docs" / "settings.md").read_text(), flags=re.M)
    known_by_their_names = {"runtime.kind"}
    assert {name for name in blank if not name.startswith("sampling.")} <= known_by_their_names


def test_what_deploy_promises_stands_in_the_template() -> None:
    template = (ROOT / "infra" / "template.yaml").read_text()
    parameters = set(re.findall(r"^  (\w+):\n    Type: (?:String|Number|CommaDelimitedList)", template, flags=re.M))
    table = set(re.findall(r"`([A-Z]\w+)`", (ROOT / "infra" / "README.md").read_text().partition("## Parameters")[2]))
    assert table == parameters
    outputs = set(re.findall(r"output `?([A-Z]\w+)", (ROOT / "docs" / "deploy.md").read_text()))
    assert len(outputs) == 6
    assert all(f"\n  {name}:\n" in template for name in outputs)


def test_every_threat_names_a_test_that_exists() -> None:
    rows = re.findall(r"^\| .* \|$", (ROOT / "docs" / "security.md").read_text(), flags=re.M)
    threats = [row for row in rows if "---" not in row and not row.endswith("| shown by |")]
    assert len(threats) > 25
    for row in threats:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rsplit("|", 2)[1])
        assert named, row
        for file, test in named:
            assert re.search(rf"^(?:async )?def {test}\(", (ROOT / file).read_text(), flags=re.M), f"{file}::{test}"
