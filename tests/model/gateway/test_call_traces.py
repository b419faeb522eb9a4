"""Each model call becomes a span of its rollout's trace."""

import openai
import pytest

from agent_wrapper.contract.keys import trace_ids
from builders import until, user
from rollout_backend.workbench.local.scripted import Fail
from tests.emulators.otlp_receiver import OtlpReceiver

TRACE, ROOT = (f"{value:0{digits}x}" for value, digits in zip(trace_ids("run", 0, "r"), (32, 16), strict=True))


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # milliseconds
    with OtlpReceiver() as receiver:
        yield receiver


def test_a_call_is_a_span_with_its_tokens_under_the_rollout_or_the_agents_span(play, collector):
    gateway = play(["5", Fail(400, "a private text"), "5"], otlp_endpoint=collector.url)
    agents = {"traceparent": f"00-{TRACE}-00000000000000aa-01"}
    others = {"traceparent": f"00-{'ab' * 16}-00000000000000bb-01"}
    client = gateway.client()
    answer = client.chat.completions.create(model="scripted", messages=[user("2 + 3?")], extra_headers=agents)
    with pytest.raises(openai.APIError):
        client.chat.completions.create(model="scripted", messages=[user("a secret")], extra_headers=others)
    nobodys = {"traceparent": f"00-{TRACE}-{'0' * 16}-01"}
    client.chat.completions.create(model="scripted", messages=[user("2 + 3?")], extra_headers=nobodys)
    until(lambda: len(collector.spans) == 3)
    done, failed, spanless = sorted(collector.spans, key=lambda span: span.start)
    assert (done.service, done.name, done.trace_id, done.error) == ("rollout-gateway", "chat scripted", TRACE, "")
    assert (done.parent_id, done.links) == ("00000000000000aa", ())
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 2,
        "rl.rollout_id": "r",
        "rl.attempt": 1,
    }
    assert expected.items() <= done.attributes.items()
    assert done.attributes["gen_ai.conversation.id"].endswith("s1")
    assert done.start < done.end
    assert (failed.parent_id, failed.links) == (ROOT, (("ab" * 16, "00000000000000bb"),))
    assert (spanless.parent_id, spanless.links) == (ROOT, ())
    assert failed.error == failed.attributes["error.type"] == "engine_refused"
    assert "secret" not in repr(collector.spans)
    assert "private" not in repr(collector.spans)
