"""Write docs/settings.md from the docstrings of the settings: `python docs/make_settings.py`.

`page()` returns the page as text. A test compares it with the file, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout_backend.config import ENV_PREFIX, RUNTIME_KINDS, RolloutConfig

PAGE = Path(__file__).with_name("settings.md")
_HEAD = f"""\
# Settings

Generated from `rollout_backend/config/` by `python docs/make_settings.py`; do not edit.

The backend reads settings from a YAML file, then from environment variables (`{ENV_PREFIX}STORAGE__BUCKET=...`), then
from `-o storage.bucket=...` on the command line. A later source overrides an earlier one. An unknown key is refused.
Names of times end in `_s` (seconds), names of rates in `_per_s` (per second), names of sizes in `_bytes`.

You must set `model.path`, `storage.bucket` and `runtime`. All others have a default.
"""

Schema = dict[str, Any]


def page() -> str:
    schema = RolloutConfig.model_json_schema()
    definitions: dict[str, Schema] = schema["$defs"]
    sections = {name: list(_sections(field, definitions)) for name, field in schema["properties"].items()}
    sections["runtime"] = [config.model_json_schema() for config in RUNTIME_KINDS.values()]
    top = {name: field for name, field in schema["properties"].items() if not sections[name]}
    lines = [_HEAD, "## At the top", "", *_table(schema, top, "")]
    for name, found in sections.items():
        for section in found:
            kind = section["properties"].get("kind", {}).get("const")
            lines += ["", f"## {name}" + (f", kind: {kind}" if kind else ""), ""]
            if "description" in section:
                lines += [_flat(section["description"]), ""]
            lines += _table(section, section["properties"], f"{name}.")
    return "\n".join(lines) + "\n"


def _sections(field: Schema, definitions: dict[str, Schema]) -> Iterator[Schema]:
    """Yield the sections that a field can hold: none for a plain value."""
    for choice in field.get("oneOf") or field.get("anyOf") or [field]:
        if "$ref" in choice:
            yield definitions[choice["$ref"].rsplit("/", 1)[1]]


def _table(section: Schema, fields: dict[str, Schema], prefix: str) -> Iterator[str]:
    yield "| setting | value | default | |"
    yield "| --- | --- | --- | --- |"
    required = section.get("required", ())
    for name, field in fields.items():
        # The schema gives `kind` a default, but a config must name it to select the runtime.
        default = "required" if name in required or "const" in field else _default(field)
        yield f"| `{prefix}{name}` | {_value(field)} | {default} | {_flat(field.get('description', ''))} |"


def _value(field: Schema) -> str:
    """Return the type of a setting, or its choices, with its bounds."""
    if "anyOf" in field:
        return " or ".join(_value(choice) for choice in field["anyOf"] if choice.get("type") != "null")
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if "type" not in field:
        return "anything"
    if field["type"] == "array":
        return f"list of {_value(field['items'])}"
    if field["type"] == "object":
        return f"map of {_value(field['additionalProperties'])}"
    plain = {"string": "text", "number": "number", "integer": "whole number", "boolean": "true or false"}
    name = field["format"] if field.get("format") in ("path", "import path") else plain[field["type"]]
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return ", ".join([name, *bounds])


def _default(field: Schema) -> str:
    if "default" not in field:
        return "none" if field.get("type") == "object" else "generated"
    value = field["default"]
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "none" if value in (None, "", [], {}) else f"`{value}`"


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
