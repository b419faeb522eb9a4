"""A request sent again: which get the answer of the first, and which are samples of their own."""

import json
import threading

import httpx
import openai
import pytest

from rollout_backend.core.api_error import ApiError
from rollout_backend.core.model_call import Answer, Choice, Delta, ModelCall
from rollout_backend.gateway.in_flight_call import InFlightCall
from rollout_backend.gateway.retries import _KEPT, RequestKey, RetryCache
from rollout_backend.local.scripted import Fail, Pieces, ScriptedEngine

BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Say something."}]}
RETRY = {"x-stainless-retry-count": "1"}


def post(gateway, headers=None, session="s1", body=BODY, path="/v1/chat/completions") -> httpx.Response:
    headers = {"Authorization": f"Bearer {gateway.key(session)}", **(headers or {})}
    return httpx.post(gateway.url + path, content=json.dumps(body).encode(), headers=headers, timeout=30)


def said(response: httpx.Response) -> str:
    if response.headers["content-type"].startswith("text/event-stream"):
        data = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in data)
    return response.json()["choices"][0]["message"]["content"]


@pytest.fixture
def counting():
    """An engine that says 1, 2, 3..."""
    numbers = iter(range(1, 100))
    with ScriptedEngine(lambda _: str(next(numbers))) as engine:
        yield engine


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_gets_the_recorded_answer(serve, counting, stream):
    gateway = serve(counting.url)
    body = {**BODY, "stream": stream}
    first = post(gateway, body=body)
    again = [post(gateway, RETRY, body=body) for _ in range(2)]
    assert [said(response) for response in (first, *again)] == ["1", "1", "1"]
    if not stream:
        assert again[0].json() == first.json()
    (segment,) = gateway.trajectory().segments
    assert len(segment.turns) == 1
    assert gateway.stats().replayed == 2


def test_the_same_question_without_a_word_of_a_retry_is_a_new_sample(serve, counting):
    gateway = serve(counting.url)
    assert [said(post(gateway, headers)) for headers in (None, {"x-stainless-retry-count": "0"})] == ["1", "2"]
    assert len(gateway.trajectory().segments) == 2


def test_an_idempotency_key_names_one_call(serve, counting):
    gateway = serve(counting.url)
    keys = ["a", "b", "a", "b", "c"]
    assert [said(post(gateway, {"Idempotency-Key": key})) for key in keys] == ["1", "2", "1", "2", "3"]


def test_another_body_session_or_dialect_is_another_call(serve, counting):
    gateway = serve(counting.url)
    assert said(post(gateway)) == "1"
    assert said(post(gateway, RETRY, body={**BODY, "max_tokens": 7})) == "2"
    assert said(post(gateway, RETRY, session="s2")) == "3"
    messages = post(gateway, RETRY, body={**BODY, "max_tokens": 9}, path="/v1/messages")
    assert messages.json()["content"][0]["text"] == "4"


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_joins_the_call_in_flight(serve, stream):
    go, asked = threading.Event(), threading.Semaphore(0)

    def parts():
        yield "Once upon "
        asked.release()
        go.wait(30)
        yield "a time"

    with ScriptedEngine(lambda _: Pieces(parts())) as engine:
        gateway = serve(engine.url)
        answers = []
        body = {**BODY, "stream": stream}
        threads = [
            threading.Thread(target=lambda headers=headers: answers.append(said(post(gateway, headers, body=body))))
            for headers in (None, RETRY)
        ]
        threads[0].start()
        assert asked.acquire(timeout=10)
        threads[1].start()
        while gateway.stats().replayed == 0:
            pass
        go.set()
        for thread in threads:
            thread.join(10)
    assert answers == ["Once upon a time"] * 2
    assert len(engine.requests) == 1


def test_a_retry_of_a_call_that_failed_is_made_again(serve):
    down = True
    with ScriptedEngine(lambda _: Fail(500) if down else "up") as engine:
        gateway = serve(engine.url, engine_attempts=1)
        assert post(gateway).status_code == 503
        down = False
        assert said(post(gateway, RETRY)) == "up"


def test_one_of_several_equal_questions_that_failed_is_not_answered_by_another(serve, counting):
    """Best of three: the third is refused for want of room, and its retry must be a third sample."""
    gateway = serve(counting.url, gateway={"max_concurrent_calls": 1})
    release, entered = threading.Event(), threading.Event()
    replies = iter("12")

    def held(_):
        entered.set()
        release.wait(30)
        return next(replies)

    counting.script("s1", held)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(said(post(gateway))))
    thread.start()
    assert entered.wait(10)
    assert post(gateway).status_code == 429
    release.set()
    thread.join(10)
    assert said(post(gateway, RETRY)) == "2"
    assert answers == ["1"]


def test_the_sdks_own_retry_is_told_from_a_new_question(serve, counting):
    """OpenAI's client: the answer is lost behind a proxy that breaks once."""
    gateway = serve(counting.url)
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
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key(), max_retries=1, http_client=http)
        texts = [client.chat.completions.create(**BODY).choices[0].message.content for _ in range(2)]
    assert texts == ["1", "2"]
    assert gateway.stats().calls == 2


# --- what is remembered -----------------------------------------------------------------------------------


def asked(text: str, **headers: str) -> RequestKey:
    return RequestKey("chat", text.encode(), headers)


RETRIED = {"x-stainless-retry-count": "2"}


ANSWER = Answer("i", 0, "m", (), 0)


async def call(replays: RetryCache, name: str, result: Answer | Exception = ANSWER) -> InFlightCall:
    async def work() -> Answer:
        if isinstance(result, Exception):
            raise result
        return result

    running = InFlightCall(ModelCall("m", []))
    running.join()
    task = running.start(work())
    replays.add(asked(name), running)
    while not task.done():
        await running.wait_for_more(0)
    return running


async def test_the_oldest_answers_are_forgotten():
    replays = RetryCache()
    for i in range(_KEPT + 5):
        (await call(replays, str(i))).leave(delivered=True)
    assert len(replays) == _KEPT
    assert replays.find(asked("4", **RETRIED)) is None
    assert replays.find(asked("5", **RETRIED)) is not None


async def test_a_failed_call_is_forgotten():
    replays = RetryCache()
    await call(replays, "a", ApiError(503, "no"))
    assert len(replays) == 0
    assert replays.find(asked("a", **RETRIED)) is None


async def test_an_answer_that_nobody_got_is_kept_for_whoever_asks_next():
    replays = RetryCache()
    running = await call(replays, "a")
    assert replays.find(asked("a")) is None  # its client is still there
    running.leave(delivered=False)
    assert replays.find(asked("a")) is running
    running.join()
    assert replays.find(asked("a")) is None
    running.leave(delivered=True)
    assert replays.find(asked("a")) is None
    assert replays.find(asked("a", **RETRIED)) is running


async def test_what_is_kept_is_the_answer_and_not_what_was_asked():
    message = {"role": "assistant", "content": "abc", "reasoning_content": "r"}
    replays = RetryCache()
    running = InFlightCall(ModelCall("m", [{"role": "user", "content": "x"}]))
    running.join()

    async def work() -> Answer:
        running.emit([Delta("text", letter) for letter in "abc"])
        return Answer("i", 0, "m", (Choice(message, "stop", 4),), 1)

    await running.start(work())
    replays.add(asked("a"), running)
    assert [delta.text for delta in running.deltas] == ["a", "b", "c"]
    running.leave(delivered=True)
    assert running.call.messages == ()
    assert running.deltas == [Delta("reasoning", "r"), Delta("text", "abc")]


async def test_as_many_retries_as_failed_are_new_calls():
    replays = RetryCache()
    running = await call(replays, "a")
    for _ in range(2):
        replays.failed(asked("a"))
    found = [replays.find(asked("a", **RETRIED)) for _ in range(3)]
    assert found == [None, None, running]


@pytest.mark.parametrize(
    ("headers", "is_declared"), [({}, False), ({"x-stainless-retry-count": "x"}, False), (RETRIED, True)]
)
def test_what_says_that_it_is_a_repetition(headers, is_declared):
    assert asked("a", **headers).is_declared is is_declared
