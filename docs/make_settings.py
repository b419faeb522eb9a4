"""Write docs/settings.md from the docstrings of the settings: `python docs/make_settings.py`.

`page()` returns the page as text. A test compares it with the file, so the two cannot differ.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollout_backend.config import ENV_PREFIX, RUNTIME_KINDS, RolloutConfig
from rollout_backend.config.runtimes import RuntimeConfig
from rollout_backend.config.section import Section

PAGE = Path(__file__).with_name("settings.md")
_HEAD = f"""\
# Settings

Generated from `rollout_backend/config/` by `python docs/make_settings.py`; do not edit.

The backend reads settings from a YAML file, then from environment variables (`{ENV_PREFIX}STORAGE__BUCKET=...`), then
from `-o storage.bucket=...` on the command line. A later source overrides an earlier one. An unknown key is refused.
Names of times end in `_s` (seconds), names of rates in `_per_s` (per second), names of sizes in `_bytes`. As in
Compose, keys at the top of the file that begin with `x-` are ignored: put anchors there (`x-common: &common`).

You must set `model.path`, `storage.bucket` and `runtime`. All others have a default.

```sh
rollout doctor config.yaml -o group.size=8
```
"""
_OFTEN_SET = (
    "model.path",
    "model.context_length",
    "storage.bucket",
    "aws.region",
    "runtime.kind",
    "runtime.arn",
    "runtime.max_sessions",
    "runtime.invoke_per_s",
    "serving.servers",
    "serving.tensor_parallel",
    "gateway.public_url",
    "group.size",
    "group.policy",
    "timeouts.agent_s",
    "timeouts.collection_s",
)
_EXAMPLES = {
    "model": """\
# A fine-tune of Qwen3 in a folder with another name
model:
  path: /models/my-agent-17
  renderer: qwen3
  renderer_options: {enable_thinking: false}
""",
    "storage": """\
# Several teams share a bucket
storage:
  bucket: my-bucket
  prefix: team-a/
""",
    "runtime, kind: agentcore": """\
# A runtime that exists, in an account with a higher quota of new sessions
runtime:
  kind: agentcore
  arn: arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/my_agent-0123456789
  invoke_per_s: 20
""",
    "runtime, kind: http": """\
# An agent server of your own, which runs up to 200 sessions at once
runtime:
  kind: http
  url: http://agents.internal:8080
  max_sessions: 200
""",
    "runtime, kind: kubernetes": """\
# Agents of a cluster, with a node pool of their own
runtime:
  kind: kubernetes
  image: registry.example.com/my-agent:17
  namespace: rollouts
  requests: {cpu: 500m, memory: 1Gi}
  limits: {memory: 2Gi}
  node_selector: {pool: agents}
  tolerations: [{key: agents, operator: Exists, effect: NoSchedule}]
  max_sessions: 500
""",
    "runtime, kind: process": """\
# Eight agents at a time on this machine, each with at most 1 GiB
runtime:
  kind: process
  app: agent:app
  working_dir: /home/me/my_agent
  max_sessions: 8
  memory_bytes: 1073741824
""",
    "scoring": """\
# A judge that answers slowly, asked about sixteen rollouts at once
scoring:
  function: judge.py:score
  timeout_s: 600
  processes: 16
""",
    "aws": """\
aws:
  region: eu-west-1
""",
    "queue": """\
# The stack's queue, for a trainer that may not create queues
queue:
  url: https://sqs.us-east-1.amazonaws.com/123456789012/my-agent-queue
""",
    "serving": """\
# Eight GPUs: four servers with two GPUs each
serving:
  servers: 4
  tensor_parallel: 2
""",
    "router": """\
# Gateways on other machines (gateway.kind: ray) reach the router
router:
  host: 0.0.0.0
""",
    "gateway": """\
# Agents on other machines reach the gateway by TLS
gateway:
  host: 0.0.0.0
  port: 8443
  public_url: https://rollouts.example.com:8443
  tls_certificate: /etc/rollout/fullchain.pem
  tls_key: /etc/rollout/key.pem
""",
    "relay": """\
# Agents call a relay; its key is in ROLLOUT__RELAY__KEY
relay:
  url: wss://relay.example.com
""",
    "sampling": """\
sampling:
  temperature: 0.7
  max_tokens: 2048
""",
    "group": """\
# Eight trainable rollouts per task, without waiting for the slowest of ten
group:
  size: 8
  oversample: 2
  straggler_after: 0.9
""",
    "circuit_breaker": """\
# Tolerate outages of up to five minutes
circuit_breaker:
  min_span_s: 300
""",
    "timeouts": """\
# Agents that take up to an hour
timeouts:
  agent_s: 3600
  collection_s: 7200
  session_key_s: 9000
""",
    "janitor": """\
# You need more time to restart a killed trainer
janitor:
  grace_s: 1800
""",
    "observe": """\
observe:
  metrics_port: 9300
""",
    "prices": """\
prices:
  session_vcpus: 0.3
  session_gb: 0.5
  gpu_hour: 2.50
""",
}

Schema = dict[str, Any]


def page() -> str:
    schema = _schema(RolloutConfig)
    definitions: dict[str, Schema] = schema["$defs"]
    shared = _schema(RuntimeConfig)
    tables = {"At the top": (schema, "")}  # title: what it lists, and what is before each name
    for name, field in schema["properties"].items():
        if name == "runtime":
            tables["runtime, any kind"] = (shared, "runtime.")
            for kind, config in RUNTIME_KINDS.items():
                parent = next(base for base in config.__mro__[1:] if base in (*RUNTIME_KINDS.values(), RuntimeConfig))
                own = _without(_schema(config), _schema(parent))
                tables[f"runtime, kind: {kind}"] = (own, "runtime.")
        else:
            for section in _sections(field, definitions):
                tables[name] = (section, f"{name}.")
    rows = {title: list(_rows(section, prefix)) for title, (section, prefix) in tables.items()}
    often = []
    for name in _OFTEN_SET:
        found = [row for listed in rows.values() for row in listed if row[0] == name]
        default = found[0][2] if len({row[2] for row in found}) == 1 else "depends on the kind"
        often.append((name, default, found[0][3].partition(". ")[0].removesuffix(".") + "."))
    lines = [_HEAD, "## What people set", "", *_table(("setting", "default", ""), often)]
    for title, (section, prefix) in tables.items():
        lines += ["", f"## {title}", ""]
        if prefix and "description" in section:
            lines += [_flat(section["description"]), ""]
        if title in _EXAMPLES:
            lines += [f"```yaml\n{_EXAMPLES[title]}```", ""]
        lines += _table(("setting", "value", "default", ""), rows[title])
    return "\n".join(lines) + "\n"


def _schema(section: type[Section]) -> Schema:
    """Return the schema of a section, with the docstrings of its fields and those of the sections in it."""
    schema = section.model_json_schema()
    schemas = {section.__name__: schema, **schema.get("$defs", {})}
    for kind in _kinds(Section):
        fields = schemas.get(kind.__name__, {}).get("properties", {})
        for base in reversed(kind.__mro__[: kind.__mro__.index(Section)] if fields else ()):
            source: Any = ast.parse(inspect.getsource(base)).body[0]
            for field, text in pairwise(source.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    fields.get(ast.unparse(field.target), {})["description"] = ast.literal_eval(text.value)
    return schema


def _kinds(section: type[Section]) -> Iterator[type[Section]]:
    """Yield the sections that this package derives from one."""
    for kind in section.__subclasses__():
        if kind.__module__.startswith("rollout_backend."):
            yield kind
            yield from _kinds(kind)


def _sections(field: Schema, definitions: dict[str, Schema]) -> Iterator[Schema]:
    """Yield the sections that a field can hold: none for a plain value."""
    for choice in field.get("oneOf") or field.get("anyOf") or [field]:
        if "$ref" in choice:
            yield definitions[choice["$ref"].rsplit("/", 1)[1]]


def _without(section: Schema, shared: Schema) -> Schema:
    """Return a runtime's section without the settings that all kinds share, except where its default differs."""
    fields = {
        name: field
        for name, field in section["properties"].items()
        if name != "kind" and field != shared["properties"].get(name)
    }
    return {**section, "properties": fields}


def _rows(section: Schema, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    required = section.get("required", ())
    for name, field in section["properties"].items():
        if not prefix and ("$ref" in str(field)):
            continue  # a section
        yield (
            f"{prefix}{name}",
            _value(field),
            "required" if name in required else _default(field),
            _flat(field.get("description", "")),
        )


def _table(header: tuple[str, ...], rows: list[Any]) -> Iterator[str]:
    for cells in (header, ("---",) * len(header)):
        yield "| " + " | ".join(cells).rstrip() + " |"
    for name, *cells in rows:
        yield f"| {' | '.join([f'`{name}`', *cells])} |"


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
    bounds = [f"{sign} {field[key]:.10g}" for key, sign in signs.items() if key in field]
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
