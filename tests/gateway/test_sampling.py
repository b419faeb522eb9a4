import pytest

from agent_wrapper.contract import Sampling
from rollout_backend.core.api_error import ApiError
from rollout_backend.core.model_call import ModelCall
from rollout_backend.gateway.engine.protocol import engine_params, reply_limit


def params(trainers=Sampling(), allowed=(), prompt=10, context=100, left=None, choice=0, **more) -> dict:  # noqa: B008
    call = ModelCall("m", [], **more)
    return engine_params(call, trainers, allowed, reply_limit(prompt, context, left), [2], choice=choice)[0]


@pytest.mark.parametrize(
    ("asked", "trainers", "prompt", "left", "wanted"),
    [
        (None, None, 10, None, 90),
        (7, None, 10, None, 7),
        (7, 5, 10, None, 5),
        (None, 50, 60, None, 40),
        (500, 500, 99, None, 1),
        (None, 50, 10, 8, 8),
        (3, 50, 10, 8, 3),
    ],
)
def test_the_length_of_a_reply_is_the_smallest_limit(asked, trainers, prompt, left, wanted):
    found = params(Sampling(max_tokens=trainers), prompt=prompt, left=left, max_new_tokens=asked)
    assert found["max_new_tokens"] == wanted


@pytest.mark.parametrize(
    ("room", "code"), [({"prompt": 100}, "context_length_exceeded"), ({"left": 0}, "session_tokens_exceeded")]
)
def test_a_call_without_room_for_a_reply_is_refused(room, code):
    with pytest.raises(ApiError) as error:
        params(**room)
    assert (error.value.status, error.value.code) == (400, code)


def test_an_agents_seed_differs_between_choices():
    assert [params(allowed=["seed"], sampling={"seed": 5}, choice=i)["sampling_seed"] for i in range(2)] == [5, 6]
