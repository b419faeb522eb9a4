"""Which repeated requests get the answer of the first, and which are new samples."""

import asyncio
import pickle

import httpx
import openai
import pytest

from builders import function_tool, hang_up, stream_data, until, user
from rollout_backend.model.gateway.sessions.calls import MAX_ANSWERS, InFlightCall, RequestKey, RetryCache
from rollout_backend.model.model_call import Answer, Choice, Delta, ModelCall
from rollout_backend.workbench.local.scripted import Fail

BODY = {"model": "scripted", "messages": [user("Say something.")]}
COUNT = "x-stainless-retry-count"
RETRY = {COUNT: "1"}


def post(gateway, headers=None, session="s1", body=BODY) -> httpx.Response:
    return gateway.post(body, session, headers=headers)


def said(response: httpx.Response) -> str:
    if response.headers["content-type"].startswith("text/event-stream"):
        chunks = stream_data(response.text.splitlines())
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    return response.json()["choices"][0]["message"]["content"]


@pytest.fixture
def counting(play):
    """A gateway whose engine says 1, 2, 3..."""
    numbers = iter(range(1, 100))
    return play(lambda _: str(next(numbers)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_gets_the_recorded_answer(counting, stream):
    body = {**BODY, "stream": stream}
    first = post(counting, body=body)
    again = [post(counting, {COUNT: number}, body=body) for number in "12"]
    assert [said(response) for response in (first, *again)] == ["1", "1", "1"]
    if not stream:
        assert again[0].json() == first.json()
    [segment] = counting.trajectory().segments
    assert len(segment.turns) == 1
    assert counting.stats().replayed == 2


def test_an_idempotency_key_identifies_one_call(counting):
    answers = [said(post(counting, {"Idempotency-Key": key})) for key in ("a", "b", "a", "b", "c")]
    assert answers == ["1", "2", "1", "2", "3"]


def test_another_body_session_or_dialect_is_another_call(counting):
    assert said(post(counting)) == "1"
    assert said(post(counting, RETRY, body={**BODY, "max_tokens": 7})) == "2"
    assert said(post(counting, RETRY, session="s2")) == "3"
    assert [said(post(counting, {"Idempotency-Key": "k"}, session=each)) for each in ("s1", "s2")] == ["4", "5"]
    answer = counting.post({**BODY, "max_tokens": 9}, headers=RETRY, path="/v1/messages")
    assert answer.json()["content"][0]["text"] == "6"


async def test_a_retry_of_a_call_that_is_being_aborted_is_a_new_call():
    """Its client disconnected, and the retry arrives before the engine has confirmed the abort."""
    aborting, confirmed = asyncio.Event(), asyncio.Event()

    async def sample():
        try:
            await asyncio.Event().wait()
        finally:
            aborting.set()
            await confirmed.wait()

    cache, running = RetryCache(), InFlightCall(ModelCall("m", []), asked("body"))
    task = running.start(sample())
    cache.add(running)
    running.join()
    assert cache.find(asked("body", **RETRY)) is running
    await asyncio.sleep(0)
    running.leave()
    await aborting.wait()
    assert not running.done
    assert cache.find(asked("body", **RETRIED)) is None
    confirmed.set()
    await asyncio.wait({task})
    assert not len(cache)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["disconnect", "error"])
def test_a_retry_gets_no_answer_of_an_earlier_equal_question(play, held, stream, fault):
    failing = False
    numbers = iter(range(1, 100))

    def reply(prompt):
        if not failing:
            return str(next(numbers))
        return Fail(500) if fault == "error" else held(prompt)

    gateway = play(reply, engine_attempts=1)
    body = {**BODY, "stream": stream}
    assert said(post(gateway, body=body)) == "1"
    failing = True
    if fault == "disconnect":
        hang_up(gateway.url, gateway.key(), body, lambda: held.asked.acquire(timeout=120))
        until(lambda: gateway.stats().client_disconnects == 1)
        held.go.set()
    else:
        assert post(gateway, body=body).status_code == 503
    failing = False
    assert [said(post(gateway, {COUNT: number}, body=body)) for number in "12"] == ["2", "2"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_joins_the_call_in_flight(play, held, in_thread, stream):
    gateway = play(lambda _: held.pieces("Once upon ", "a time"))
    body = {**BODY, "stream": stream}
    first = in_thread(post, gateway, None, body=body)
    assert held.asked.acquire(timeout=120)
    second = in_thread(post, gateway, RETRY, body=body)
    until(lambda: gateway.stats().replayed)
    held.go.set()
    assert [said(call.result(120)) for call in (first, second)] == ["Once upon a time"] * 2
    assert len(gateway.engine.requests) == 1


def test_equal_questions_that_were_refused_before_they_came_here_are_a_sample_each(play, held, in_thread):
    """An agent asks for several samples in parallel while the gateway restarts, so all arrive as retries."""
    numbers = iter("1234")
    gateway = play(lambda prompt: held(prompt) and next(numbers))
    calls = [in_thread(post, gateway, RETRY) for _ in range(4)]
    until(lambda: len(gateway.engine.requests) == 4)
    held.go.set()
    assert sorted(said(call.result(120)) for call in calls) == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("counts", "samples"),
    [
        ("0 1 2", "1 1 1"),
        ("0 2", "1 1"),  # the attempt between them did not get here
        ("0 1 1", "1 1 2"),
        ("0 0 1", "1 2 3"),  # a retry of either, or of a third
        ("0 0 1 2", "1 2 3 3"),
        ("2 1", "1 2"),
    ],
)
def test_a_retry_joins_a_call_only_if_no_other_comes_into_question(counting, counts, samples):
    assert [said(post(counting, {COUNT: count})) for count in counts.split()] == samples.split()


def test_a_retry_of_the_sdk_differs_from_a_new_question(counting):
    """OpenAI's client behind a proxy that loses one answer."""
    lost = 1

    class LosesAnAnswer(httpx.HTTPTransport):
        def handle_request(self, request):
            nonlocal lost
            response = super().handle_request(request)
            if lost:
                lost -= 1
                response.read()
                raise httpx.ReadError("the connection broke")
            return response

    with httpx.Client(transport=LosesAnAnswer()) as http:
        url = f"{counting.url}/v1"
        client = openai.OpenAI(base_url=url, api_key=counting.key(), max_retries=1, http_client=http)
        texts = [client.chat.completions.create(**BODY).choices[0].message.content for _ in range(2)]
    assert texts == ["1", "2"]
    assert counting.stats().calls == 2


# --- the cache --------------------------------------------------------------------------------------------


def asked(text: str, **headers: str) -> RequestKey:
    return RequestKey.of("chat", text.encode(), headers)


RETRIED = {"x-stainless-retry-count": "2"}
ANSWER = Answer("i", 0, "m", (), 0)


async def call(replays: RetryCache, name: str, result: Answer | Exception = ANSWER, **headers: str) -> InFlightCall:
    async def work() -> Answer:
        if isinstance(result, Exception):
            raise result
        return result

    running = InFlightCall(ModelCall("m", []), asked(name, **headers))
    running.join()
    task = running.start(work())
    replays.add(running)
    while not task.done():
        await running.wait_for_more(0)
    return running


async def test_the_oldest_answers_are_forgotten():
    replays = RetryCache()
    for i in range(MAX_ANSWERS + 5):
        running = await call(replays, str(i))
        running.delivered = True
        running.leave()
    assert len(replays) == MAX_ANSWERS
    assert replays.find(asked("4", **RETRIED)) is None
    assert replays.find(asked("5", **RETRIED)) is not None


async def test_an_undelivered_answer_is_returned_to_the_next_equal_question():
    replays = RetryCache()
    running = await call(replays, "a")
    assert replays.find(asked("a")) is None  # its client is still there
    running.leave()
    assert replays.find(asked("a")) is running
    running.join()
    assert replays.find(asked("a")) is None
    running.delivered = True
    running.leave()
    assert replays.find(asked("a")) is None
    assert replays.find(asked("a", **RETRIED)) is running


async def test_retries_after_a_restart_get_an_answer_each():
    replays = RetryCache()
    for _ in range(2):
        replays.remember(asked("a"), ANSWER)
    found = [replays.find(asked("a", **RETRY)) for _ in range(3)]
    assert found[0] is not found[1] is not None
    assert found[2] is None


async def test_the_cache_keeps_the_answer_and_drops_the_question():
    message = {"role": "assistant", "content": "abc", "reasoning_content": "r"}
    large = "x" * 100_000
    question = {
        "messages": [{"role": "user", "content": large}],
        "prompt": large,
        "images": {"0": large},
        "tools": [function_tool("f", large)],
        "json_schema": {"description": large},
        "stop": (large,),
        "dialect_data": large,
    }
    running = InFlightCall(ModelCall("m", **question, stream=True))
    running.join()

    async def work() -> Answer:
        running.emit([Delta("text", letter) for letter in "abc"])
        return Answer("i", 0, "m", (Choice(message, "stop", 4),), 1)

    await running.start(work())
    assert [delta.text for delta in running.deltas] == ["a", "b", "c"]
    running.delivered = True
    running.leave()
    assert len(pickle.dumps(running.call)) < 10_000
    assert running.deltas == [Delta("reasoning", "r"), Delta("text", "abc")]


@pytest.mark.parametrize(
    ("headers", "is_declared"),
    [
        ({}, False),
        ({"x-stainless-retry-count": "x"}, False),
        ({"x-stainless-retry-count": "00"}, False),
        (RETRIED, True),
        ({"x-stainless-retry-count": "9" * 5000}, True),
    ],
)
def test_a_positive_retry_count_declares_a_retry(headers, is_declared):
    assert asked("a", **headers).is_declared is is_declared
