"""Spans reach a collector, and a collector that is away holds nothing up."""

import importlib.util
import socket
import threading

import pytest

from builders import until
from rollout_backend.base.tracing import Span, SpanSender
from rollout_backend.errors import ConfigError
from stub_server import StubServer
from tests.emulators.otlp_receiver import OtlpReceiver

SPANS = [Span(f"span {i}", trace_id=1, span_id=i + 1, parent_id=None, start=1.0, end=2.0) for i in range(3000)]


def test_spans_that_wait_are_sent_before_a_process_ends(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=rl")
    with OtlpReceiver() as receiver:
        sender = SpanSender(receiver.url + "/", "rollout-manager", close_s=120)
        sender.send(SPANS)
        sender.close()
    assert {span.name for span in receiver.spans} == {span.name for span in SPANS}
    assert {span.service for span in receiver.spans} == {"rollout-manager"}
    assert caplog.records == []


def test_a_collector_that_is_away_holds_nothing_up_and_is_reported_once(caplog):
    sender = SpanSender("http://127.0.0.1:9", "rollout-manager", close_s=0.1)
    sender.send(SPANS)
    until(lambda: caplog.messages)
    sender.close()
    first, last = caplog.messages
    assert "observe.otlp_endpoint" in first
    assert "Connection refused" in first
    assert "3,000 spans did not reach the collector" in last


def test_a_collector_that_does_not_answer_is_reported_at_the_end(caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = SpanSender(f"http://127.0.0.1:{silent.getsockname()[1]}", "rollout-manager", close_s=0.1)
        sender.send(SPANS)
        sender.close()
    first, last = caplog.messages
    assert "did not answer before the end" in first
    assert "3,000 spans did not reach the collector" in last


def test_spans_beyond_those_that_may_wait_are_counted(caplog):
    held = threading.Event()

    def slow(request):
        assert held.wait(120)
        return 200, b""

    with StubServer(slow) as collector:
        sender = SpanSender(collector.url, "rollout-manager", close_s=120, max_waiting=1000)
        sender.send(SPANS)  # no batch is accepted meanwhile
        held.set()
        sender.close()
    first, last = caplog.messages
    assert "spans are lost while the collector" in first
    assert "1,000 spans wait already" in first
    assert "accepts spans again; 2,000 spans were lost" in last


def test_each_outage_of_a_collector_is_reported(monkeypatch, caplog):
    answers = iter([400, 200, 400, 200])  # a 400 is not retried
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100")  # a full batch is sent at once
    with StubServer(lambda request: (next(answers), b"")) as collector:
        sender = SpanSender(collector.url, "rollout-manager", close_s=120)
        for done in range(1, 5):
            sender.send(SPANS[:100])
            until(lambda done=done: len(caplog.messages) == done)
        sender.close()
    for line, words in zip(caplog.messages, ("spans are lost", "again; 100 spans were lost") * 2, strict=True):
        assert words in line


def test_a_time_that_otlp_cannot_hold_loses_no_other_span():
    with OtlpReceiver() as receiver:
        sender = SpanSender(receiver.url, "rollout-manager", close_s=120)
        sender.send([*SPANS[:2], Span("far", trace_id=1, span_id=9, parent_id=None, start=1e300, end=1e300)])
        sender.close()
    assert {span.name for span in receiver.spans} == {"span 0", "span 1", "far"}


def test_without_the_extra_the_setting_is_refused(monkeypatch):
    def find(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ConfigError, match=r"observe\.otlp_endpoint.*the extra otel"):
        SpanSender("http://127.0.0.1:4318", "test")
