"""Dockerfiles, locks and workflows: nothing that they download can change without a commit here."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TRACKED = [ROOT / name for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()]
DOCKERFILES = [path for path in TRACKED if re.fullmatch(r"(.*\.)?Dockerfile", path.name)]
ENGINES = ROOT / "rollout_backend" / "model" / "serving" / "cpu_engine"
LOCKS = [*(ROOT / "constraints").glob("*.txt"), *(ROOT / "infra").glob("*-requirements.txt"), *ENGINES.glob("*.txt")]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
EXACT = re.compile(r"[^:@]+:(\d+\.\d+\.\d+|12\.\d+)(-[a-z-]+)?|[^@]+@sha256:[0-9a-f]{64}")
# infra/README.md says why: no digest of it is public.
FLOATING = {"verlai/verl:sgl0512.latest"}
LOCAL = re.compile(r".* --no-deps --no-build-isolation /\w+")
LOCKED = re.compile(r'.* --require-hashes (.* )?--requirement "?/(wrapper|relay|backend)/[\w.$-]+"?')


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_all_are_found() -> None:
    assert len(DOCKERFILES) >= 8
    assert len(LOCKS) >= 13
    assert WORKFLOWS


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=names(DOCKERFILES))
def test_an_image_is_built_from_exact_versions_and_locks(dockerfile: Path) -> None:
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.M))
    stages = {*re.findall(r"^FROM \S+ AS (\S+)", text, re.M), "${ENGINE}", "wrapper"}
    images = re.findall(r"^FROM (\S+)", text, re.M) + re.findall(r"^COPY --from=(\S+)", text, re.M)
    for image in {*images} - stages - FLOATING:
        assert EXACT.fullmatch(image), image
    for command in re.split(r"&&|;|^[A-Z]+ ", text, flags=re.M):
        words = " ".join(command.split())
        if "python install" in words:
            assert re.search(r" 3\.\d+\.\d+$", words), words
        if "pip install" not in words:
            continue
        # An agent's own requirements are its author's to pin.
        of_agent = re.search(r"--requirement (/agent/files/)?requirements\.txt$", words)
        assert of_agent or LOCAL.fullmatch(words) or LOCKED.fullmatch(words), words


@pytest.mark.parametrize("lock", LOCKS, ids=names(LOCKS))
def test_each_package_of_a_lock_is_pinned_with_its_hashes(lock: Path) -> None:
    text = re.sub(r"^#.*\n", "", lock.read_text(), flags=re.M)
    entries = re.sub(r"\\\n", " ", text).splitlines()
    assert entries
    for entry in entries:
        assert re.fullmatch(r"[\w.\[\],-]+==[^\s;]+( ; [^#]+?)?(\s+--hash=sha256:[0-9a-f]{64})+", entry), entry[:200]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=names(WORKFLOWS))
def test_a_workflow_uses_actions_by_their_commit_and_grants_little(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        for step in job["steps"]:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step.get("uses", f"a@{'0' * 40}")), (name, step)
        granted = {scope for scope, access in job.get("permissions", {}).items() if access == "write"}
        assert granted <= {"id-token"}
        # Who may publish runs nothing of the checkout.
        assert not granted or not any("run" in step for step in job["steps"])
