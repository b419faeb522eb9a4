"""Spans reach a collector, and a collector that is away holds nothing up."""

from __future__ import annotations

import importlib.util

import pytest

from otlp_receiver import OtlpReceiver
from rollout_backend import tracing
from rollout_backend.core.trace import Span
from rollout_backend.errors import ConfigError
from rollout_backend.serving.server_process import free_port
from rollout_backend.tracing import SpanSender

SPANS = [Span(f"span {i}", trace_id=1, span_id=i + 1, parent_id=None, start=1.0, end=2.0) for i in range(3000)]


def test_spans_that_wait_are_sent_before_a_process_ends(monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=rl")
    with OtlpReceiver() as receiver:
        sender = SpanSender(receiver.url + "/", "rollout-manager")
        sender.send(SPANS)
        sender.close()
    assert {span.name for span in receiver.spans} == {span.name for span in SPANS}
    assert {span.service for span in receiver.spans} == {"rollout-manager"}


def test_a_collector_that_is_away_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(tracing, "_CLOSE_S", 0.1)
    sender = SpanSender(f"http://127.0.0.1:{free_port()}", "rollout-manager")
    sender.send(SPANS)
    sender.close()


def test_without_the_extra_the_setting_is_refused(monkeypatch):
    def find(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ConfigError, match=r"observe\.otlp_endpoint.*the extra otel"):
        SpanSender("http://127.0.0.1:4318", "test")
