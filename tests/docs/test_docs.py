"""Check that the documentation names things that exist: commands, options, settings, reasons, paths, links."""

import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml
from jsonschema import Draft202012Validator

from agent_wrapper.contract import Announcement, Rollout, RolloutRequest, Trajectory, result_key
from builders import load_module
from rollout_backend import errors
from rollout_backend.cli import app
from rollout_backend.config import load_config
from rollout_backend.core.reasons import WHAT_TO_DO, documented_at
from rollouts import make_rollout
from tests.simulation.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "infra" / "README.md"]
MARKDOWN = [
    *sorted(ROOT.glob("*.md")),
    *PAGES,
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "examples").glob("*/README.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files_and_headings_that_exist() -> None:
    for page in MARKDOWN:
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}"


def command_lines(program: str) -> list[str]:
    """Return the command lines of a program in code blocks and in inline code, without those that name no command."""
    found = []
    for page in MARKDOWN:
        if page.name == "CHANGELOG.md":
            continue  # it may name commands of earlier versions
        block = re.compile(r"^ *```(\w*)\n(.*?)^ *```", flags=re.M | re.S)
        text = page.read_text()
        code = [lines for language, lines in block.findall(text) if language in ("", "sh", "bash")]
        lines = "\n".join(code).replace("\\\n", " ").splitlines() + re.findall(r"`([^`\n]+)`", block.sub("", text))
        found += [line.strip() for line in lines if re.match(rf"\s*{program} [a-z]", line)]
    assert found
    return found


def test_commands_and_their_options_exist() -> None:
    commands = typer.main.get_command(app)
    context = typer.Context(commands)
    for line in command_lines("rollout"):
        words = shlex.split(line.replace("...", ""), comments=True)
        command = commands
        rest = words[1:]
        while hasattr(command, "get_command"):
            command = command.get_command(context, rest.pop(0))
            assert command is not None, line
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word.partition("=")[0] for word in rest if word.startswith("-")} <= known, line


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    for line in command_lines("make"):
        words = [word for word in shlex.split(line, comments=True)[1:] if not word.startswith("-")]
        assert {word for word in words if "=" not in word} <= targets, line
        for variable in (word.partition("=")[0] for word in words if "=" in word):
            assert f"$({variable})" in makefile, line


def test_the_site_has_every_page_once_in_its_navigation() -> None:
    """Run `make docs` for everything else: it fails on a link that leads nowhere in the site."""

    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for each in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(each)

    found = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(found) == len(set(found))
    made = {"index.md", "glossary.md", "LICENSE.md"}  # by docs/mkdocs_hooks.py
    elsewhere = {str(page.relative_to(ROOT)) for page in MARKDOWN if page.parent != ROOT / "docs"}
    elsewhere -= {"README.md", "tests/README.md"}
    own = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert set(found) == made | elsewhere | own, "add each page to the navigation in mkdocs.yml"


def test_configs_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    base = {
        "model": {"path": "/models/Qwen3-4B"},
        "storage": {"bucket": "my-bucket"},
        "runtime": {"kind": "http", "url": "http://agents.internal:8080"},
    }
    for page in PAGES:
        # The package of the first exists in tests/agents/runtimes/test_add_a_runtime.py only, and the second has
        # configs of clients.
        if page.name in ("add-a-runtime.md", "clients.md"):
            continue
        for text in blocks(page, "yaml"):
            path.write_text(text)
            given = yaml.safe_load(text)  # some pages show only the sections that they explain
            env = {"ROLLOUT__RELAY__KEY": "k" * 32} if "relay" in given else {}
            load_config(path, env=env, base={name: value for name, value in base.items() if name not in given})


def test_the_tutorial_shows_what_rollout_init_makes() -> None:
    templates = ROOT / "rollout_backend" / "workbench" / "local" / "templates"
    shown = blocks(ROOT / "docs" / "your-agent.md", "python")
    assert shown == [(templates / name).read_text() for name in ("openai/agent.py", "common/test_agent.py")]


def test_settings_that_pages_name_exist() -> None:
    settings = set(re.findall(r"^\| `([a-z_.]+)` \|", (ROOT / "docs" / "settings.md").read_text(), flags=re.M))
    sections = {name.partition(".")[0] for name in settings if "." in name}
    for page in PAGES:
        for name in re.findall(r"`([a-z]+\.[a-z_]+)(?:: [^`]*|=[^`]*)?`", page.read_text()):
            if name.partition(".")[0] in sections and not name.endswith((".py", ".yaml")):
                assert name in settings, f"{page.name} names {name}"


def test_pip_installs_name_what_is_here_and_no_distribution_that_no_registry_has() -> None:
    """An attacker could register a missing name and run code on the machine of a reader who copies the command."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    lines = []
    for page in [ROOT / "README.md", *PAGES, *(ROOT / "examples").glob("*/README.md")]:
        lines += re.findall(r"pip install\s[^`\n]*(?:\n[^`\n]*)?(?=`)", page.read_text())
    assert len(lines) >= 7
    for line in lines:
        words = shlex.split(line, comments=True)[2:]
        while words:
            word = words.pop(0)
            if word in ("-c", "--constraint"):
                assert (ROOT / "constraints" / Path(words.pop(0)).name).is_file(), line
            elif word == "-r":
                assert (ROOT / words.pop(0)).is_file(), line
            elif word not in (".", "--no-deps"):
                found = re.fullmatch(r"(?:\.|rollout_backend-[\d.]+-py3-none-any\.whl)\[(\w+)\]", word)
                assert found, line
                assert found[1] in extras, line


def test_every_reason_is_explained() -> None:
    sources = "\n".join(
        path.read_text()
        for package in ("agent_wrapper", "rollout_backend")
        for path in (ROOT / package).rglob("*.py")
    )
    outcomes = r"Outcome\.(?:AGENT_ERROR|INFRA_ERROR|TIMED_OUT|CANCELLED),\s*\"([a-z_]+)\""
    rejected = r"\braise InvokeRejected\([^)]*reason=|InvokeRejected\(text, reason="
    others = rf"(?:fromkeys\(group\.open, |_settle_open\(|{rejected})\"([a-z_]+)\""
    reasons = set(re.findall(outcomes, sources)) | set(re.findall(others, sources))
    reasons |= {kind.reason for kind in vars(errors).values() if isinstance(getattr(kind, "reason", None), str)}
    assert len(reasons) > 20
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    explained = re.findall(r"^### `([a-z_]+)`$", page, flags=re.M)
    assert sorted(explained) == sorted(WHAT_TO_DO)
    assert reasons - set(explained) == set()
    assert documented_at("no_result") == "docs/troubleshooting.md#no_result"
    assert documented_at("of_another_wrapper") == "docs/troubleshooting.md#why-rollouts-fail"


def test_the_generated_pages_are_up_to_date() -> None:
    for name in ("settings", "cli", "calls", "clients", "api", "contract_schema", "models", "columns"):
        module = load_module(ROOT / "docs" / f"make_{name}.py")
        assert module.PAGE.read_text() == module.page(), f"run `python docs/make_{name}.py`"


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
    assert len(outputs) == 7
    assert all(f"\n  {name}:\n" in template for name in outputs)


def test_the_tests_messages_and_mutants_of_the_tests_tables_exist() -> None:
    counts: Counter[str] = Counter()
    mutants: set[str] = set()
    for table in re.findall(r"(?:^\| .*\n)+", (ROOT / "tests" / "README.md").read_text(), flags=re.M):
        header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
        if not {"test", "shown by"} & {*header}:
            continue
        for cells in rows:
            row = dict(zip(header, cells, strict=False))  # an empty mutant is stripped
            named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row.get("test") or row["shown by"])
            assert named, row
            for file, name in named:
                path = next(place / file for place in (ROOT, ROOT / "tests") if (place / file).is_file())
                assert not name or f"def {name}(" in path.read_text(), f"{file}::{name}"
                if "mistake" in row:
                    source = re.sub(r'"\n\s+f?"', "", path.read_text())  # a text on several lines is one
                    assert row["message"].strip("`") in source, row
            mutants |= {*row.get("mutant", "").replace("`", "").split(", ")} - {""}
        counts[header[0]] += len(rows)
    assert mutants == MUTANTS.keys()
    assert counts["mistake"] == 14
    assert counts["what fails"] > 60
    assert counts["attack"] > 25


def test_paths_in_the_documentation_exist() -> None:
    tops = "agent_wrapper|rollout_backend|tests|infra|benchmarks|docs|examples|constraints"
    for page in MARKDOWN:
        for path in re.findall(rf"`((?:{tops})/[\w./-]*)`", page.read_text()):
            assert (ROOT / path).exists() or (ROOT / "tests" / path).exists(), f"{page.name} names {path}"


def test_paths_in_the_architecture_exist() -> None:
    named = re.findall(r"`([\w./-]+(?:\.py|/))`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(named) > 40
    for path in named:
        assert (ROOT / path).exists() or (ROOT / "rollout_backend" / path).exists(), path


def test_the_architecture_describes_every_folder_once() -> None:
    described = re.findall(r"\*\*`([\w./-]+/)`\*\*", (ROOT / "ARCHITECTURE.md").read_text())
    wings = [path.parent for path in (ROOT / "rollout_backend").glob("*/__init__.py")]
    packages = {f"{wing.name}/" for wing in wings}
    packages |= {
        f"{wing.name}/{room.parent.name}/"
        for wing in wings
        if wing.name in ("agents", "model", "run", "workbench")
        for room in wing.glob("*/__init__.py")
    }
    others = {"agent_wrapper/", "rollout_backend/", "infra/", "examples/", "benchmarks/", "tests/"}
    assert sorted(described) == sorted(packages | others)


def test_the_contracts_examples_and_what_the_types_encode_follow_its_schema() -> None:
    schema = json.loads((ROOT / "docs" / "contract.schema.json").read_text())
    validator = Draft202012Validator(schema)
    parsers = {
        "_rollout": lambda text: RolloutRequest.parse(json.loads(text)["_rollout"]),
        "unanswered_calls": lambda text: Trajectory.decode(text.encode()),
        "outcome": lambda text: Rollout.decode(text.encode()),
        "Records": Announcement.decode,
    }
    examples = blocks(ROOT / "docs" / "contract.md", "json")
    assert len(examples) == len(parsers)
    for text in examples:
        [kind] = parsers.keys() & json.loads(text).keys()
        assert parsers[kind](text)
        assert kind == "Records" or validator.is_valid(json.loads(text)), kind
    assert parsers["Records"](examples[3])[0].key == result_key("", "run-7", 3, "sum-2-2.0")
    made = json.loads(make_rollout().to_json())
    assert validator.is_valid(made)
    assert not validator.is_valid({**made, "more": 1})
    assert not validator.is_valid({**made, "session_id": None})
