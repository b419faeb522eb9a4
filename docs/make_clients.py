"""Write docs/clients.md from the table of harnesses that the tests run: `python docs/make_clients.py`.

`page()` returns the page as text. A test compares it with the file, so the two cannot differ.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("clients.md")
sys.path.append(str(ROOT / "tests" / "support"))

from harnesses import HARNESSES, ONE_ROW, Harness  # noqa: E402

_HEAD = """\
# Connect your client

Generated from the harnesses that the tests run, by `python docs/make_clients.py`; do not edit.

Your agent calls the model with the client that it already uses. Set three values, which come from
[its context](wrap-your-agent.md#read-the-task-and-the-endpoint):

| value | in the sections below |
| --- | --- |
| `context.base_url`, which ends in `/v1` | `BASE_URL` |
| `context.api_key`, for this rollout's session | `API_KEY` |
| `context.model`, the name under which the model is served | `MODEL` |

The same `BASE_URL` works for OpenAI's and Anthropic's clients. Anthropic's client appends `/v1/messages`, and the
gateway accepts that. Send the key as `Authorization: Bearer` or as `x-api-key`.

With every client:

- **Sampling settings** such as `temperature` and `top_p` come from [the trainer's settings](settings.md), not from
  the client.
- **Set long timeouts and many retries.** OpenAI's and Anthropic's clients take `max_retries` and `timeout`. Eight
  retries outlast the restart of an engine or a gateway; forty outlast the restart of the whole training side.
- **Give equal parallel questions a key.** If an agent asks for several samples of one question, send a different
  `Idempotency-Key` header with each. Without one, a retry of a refused connection can get the answer of another.
- **Unsupported fields** are answered 400 with [the field's name](gateway.md#supported-request-fields).
- **Forced formats** (`tool_choice`, JSON mode, a schema) are not trained. Frameworks force one if you ask for
  structured output: let the model answer freely and read its text instead.
- **Keep the history.** If your framework shortens, summarises or trims it, the rest becomes a new row. Turn this off
  unless you want to train it that way.
- **Replies that are cut** are trained up to [the cut](token-identity.md#replies-that-the-agent-cuts). By default,
  [magentic](#magentic) is such a client.
- **Messages that a client rewrites** open a new row. The clients with several rows below do so: their sections say
  what they drop, merge, move or rewrite.

Command-line agents can run [without a line of Python](commands.md).

## Clients and rows

Each test runs an unmodified client on one linear conversation with tool calls: a framework adds numbers, a
command-line agent fixes a file in a git repository. It compares the trained tokens with the sampled ones.
*One row* means that the conversation is trained as [one sequence](token-identity.md); a further row names [why it was
opened](token-identity.md#reasons-for-a-new-row).
"""
_SDKS = """\

## OpenAI SDK

```python
client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY)  # or openai.OpenAI(**context.openai_kwargs())
client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
client.responses.create(model=MODEL, input=items, instructions=system, tools=tools)
```

You can also set `OPENAI_BASE_URL` and `OPENAI_API_KEY`. The gateway stores nothing between calls of the responses
API: send the whole conversation as `input` (`previous_response_id` is answered 400). `responses.input_tokens.count`
works.

## Anthropic SDK

```python
client = anthropic.Anthropic(base_url=BASE_URL, api_key=API_KEY)
client.messages.create(model=MODEL, max_tokens=2048, system=system, messages=messages, tools=tools)
```

You can also set `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. `count_tokens` and `models` work; batches and files do
not.
"""


def page() -> str:
    clients = [(name, list(each)) for name, each in groupby(HARNESSES, lambda harness: harness.name)]
    pinned = (ROOT / "constraints" / "clients.txt").read_text()
    table = [("client", "version", "API", "rows of the conversation"), ("---",) * 4]
    for name, package, apis in (
        ("OpenAI SDK", "openai", "chat, responses; streamed or not"),
        ("Anthropic SDK", "anthropic", "messages; streamed or not"),
    ):
        table.append((_link(name), re.findall(rf"^{package}==(\S+)", pinned, re.M)[0], apis, "one"))
    for name, entries in clients:
        reasons = entries[0].reasons
        rows = "one" if reasons == ONE_ROW else f"{len(reasons)} (`{'`, `'.join(dict.fromkeys(reasons[1:]))}`)"
        apis = ", ".join(api for entry in entries for api in entry.apis)
        table.append((_link(name), entries[0].version, apis, rows))
    lines = [_HEAD, *(f"| {' | '.join(row)} |" for row in table), _SDKS]
    for name, entries in clients:
        lines += [f"## {name}", "", *_section(entries[0])]
    return "\n".join(lines)


def _link(name: str) -> str:
    return f"[{name}](#{re.sub(r'[^a-z0-9 -]', '', name.lower()).replace(' ', '-')})"


def _section(harness: Harness) -> Iterator[str]:
    if harness.script:
        language = {"py": "python", "mjs": "js"}[harness.script.suffix[1:]]
        connect = harness.script.read_text().partition(" connect\n")[2]
        yield from (f"```{language}", re.split(r"\n\S+ connected\n", connect)[0], "```", "")
    else:
        for name, text in harness.files.items():
            yield from (f"`~/{name}`:", "", f"```{name.rpartition('.')[2]}", text.rstrip(), "```", "")
        exports = (f"export {name}={value}" for name, value in harness.env.items())
        yield from ("```bash", *exports, harness.command, "```", "")
    if harness.script and harness.env:
        yield from ("Set " + ", ".join(f"`{name}={value}`" for name, value in harness.env.items()) + ".", "")
    if harness.note:
        yield from (harness.note, "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
