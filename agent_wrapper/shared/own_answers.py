"""Distinguish a server's own answers from those of a proxy in between.

A refusal (4xx) counts only if it has the form of the server that was asked. A load balancer, an ingress or a login
page answers for a server that it cannot reach, with any status and a page of its own. That says nothing about the
request, so it counts as no answer.
"""

import json
from collections.abc import Mapping
from typing import Any

AGENT_SERVER = {"error": (str,), "detail": (str, list)}
"""Fields of an error of the agent container's contract, and of a FastAPI application."""
ENGINE = {"error": (dict, str), "detail": (str, list), "object": (str,)}
"""Of SGLang, vLLM and their routers."""
GATEWAY = {"error": (dict,)}
KUBERNETES = {"kind": "Status"}


def own_answer(body: bytes | str, form: Mapping[str, tuple[type, ...] | str]) -> dict[str, Any] | None:
    """Return the JSON object in `body` if it has one of the fields of `form`, of these types or with this value, or
    else None."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    fits = (
        answer.get(name) == wanted if isinstance(wanted, str) else isinstance(answer.get(name), wanted)
        for name, wanted in form.items()
    )
    return answer if any(fits) else None


def is_page(body: bytes) -> bool:
    """Return whether the body is an HTML page, which no server of a rollout sends."""
    return body[:200].lstrip().lower().startswith((b"<!doctype html", b"<html"))
