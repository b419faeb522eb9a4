"""Results in the older text format: what each field means, and that whatever is wrong is named."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from agent_wrapper.contract import MAX_CONVERSATIONS, ContractError, Outcome, Rollout
from rollout_backend.collect.text_format import read_result

TOOLS = [{"type": "function", "function": {"name": "add"}}]
USER = {"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}
CALL = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "5"}
ANSWER = {"role": "assistant", "content": "5"}


def turn(*messages: dict[str, Any], tools: Any = TOOLS, **more: Any) -> dict[str, Any]:
    return {"formatted_request": {"messages": list(messages), "tools": tools, "temperature": 1.0}, **more}


def fields(**changes: Any) -> dict[str, Any]:
    whole = {
        "rollout_data": [turn(USER, CALL, turn_id=0), turn(USER, CALL, RESULT, ANSWER, turn_id=1)],
        "rewards": 0.5,
        "status_code": 200,
        "stop_reason": "end_turn",
        "input_id": "task-a",
    }
    return {name: value for name, value in {**whole, **changes}.items() if value is not ...}


def read(found: Any, max_bytes: int = 100_000) -> Rollout:
    data = found if isinstance(found, bytes) else json.dumps(found).encode()
    return read_result(data, max_bytes, run_id="run", step=3, rollout_id="task-a.1")


def test_a_result_is_a_rollout_of_messages_alone():
    rollout = read(fields())
    assert (rollout.run_id, rollout.step, rollout.task_id, rollout.rollout_id) == ("run", 3, "task-a", "task-a.1")
    assert (rollout.outcome, rollout.reward, rollout.failure) == (Outcome.COMPLETED, 0.5, None)
    assert (rollout.messages_only, rollout.trainable) == (True, False)
    assert rollout.extras == {"stop_reason": "end_turn"}
    assert (rollout.started_at, rollout.finished_at) == (0, 0)
    assert Rollout.decode(rollout.encode()) == rollout


def test_calls_that_go_on_are_one_conversation_and_each_last_message_is_the_models():
    [conversation] = read(fields()).conversations
    assert list(conversation.messages) == [USER, CALL, RESULT, ANSWER]
    assert conversation.said == (1, 3)
    assert list(conversation.tools) == TOOLS


def test_an_example_in_the_prompt_is_not_the_models():
    shown = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    [conversation] = read(fields(rollout_data=[turn(*shown, USER, ANSWER)])).conversations
    assert conversation.said == (3,)


def test_what_goes_on_from_nothing_is_a_conversation_of_its_own():
    other = {"role": "user", "content": "another matter"}
    found = read(
        fields(
            rollout_data=[
                turn(USER, CALL),
                turn(other, ANSWER),
                turn(USER, CALL, RESULT, ANSWER),
                turn(USER, CALL, RESULT, ANSWER, tools=None),
            ]
        )
    ).conversations
    assert [len(one.messages) for one in found] == [4, 2, 4]
    assert [one.said for one in found] == [(1, 3), (1,), (3,)]


def test_a_call_that_was_not_answered_adds_no_reply():
    [conversation] = read(fields(rollout_data=[turn(USER, CALL), turn(USER, CALL, RESULT)])).conversations
    assert conversation.said == (1,)
    assert len(conversation.messages) == 3


@pytest.mark.parametrize(
    ("rewards", "reward"), [(1, 1.0), (-0.5, -0.5), ([0.25], 0.25), ([0.0, 1.0], 1.0), ([1, 0], 0.0)]
)
def test_the_last_reward_is_the_rollouts(rewards, reward):
    assert read(fields(rewards=rewards)).reward == reward


@pytest.mark.parametrize("missing", ["status_code", "stop_reason"])
def test_a_status_that_is_not_told_is_good(missing):
    assert read(fields(**{missing: ...})).outcome is Outcome.COMPLETED
    assert read(fields(**{missing: None})).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("stop", ["end_turn", "stop", "stop_sequence", "max_tokens", "length"])
def test_ends_of_a_reply(stop):
    assert read(fields(stop_reason=stop)).outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("changes", "outcome", "reason", "words"),
    [
        ({"status_code": 500, "stop_reason": "KeyError: 'x'"}, "agent_error", "status_code", "500: KeyError: 'x'"),
        ({"status_code": 404}, "agent_error", "status_code", "404"),
        ({"status_code": 0}, "agent_error", "status_code", "0"),
        ({"status_code": 408}, "infra_error", "status_code", "408"),
        ({"status_code": 429}, "infra_error", "status_code", "429"),
        ({"status_code": 502}, "infra_error", "status_code", "502"),
        ({"status_code": 503}, "infra_error", "status_code", "503"),
        ({"status_code": 504, "stop_reason": None}, "infra_error", "status_code", "504"),
        ({"stop_reason": "timeout"}, "agent_error", "stop_reason", "timeout"),
    ],
)
def test_a_rollout_that_failed_has_no_reward(changes, outcome, reason, words):
    rollout = read(fields(rewards=[1.0], **changes))
    assert (rollout.outcome, rollout.reward, rollout.failure.reason) == (outcome, None, reason)
    assert words in rollout.failure.message
    assert rollout.extras["rewards"] == [1.0]
    assert not rollout.trainable


def test_an_error_may_come_without_anything_else():
    rollout = read({"status_code": 500, "stop_reason": "boom", "input_id": "task-a"})
    assert (rollout.outcome, rollout.conversations) == (Outcome.AGENT_ERROR, ())


def test_what_else_was_written_is_kept():
    assert read(fields(metrics={"steps": 3})).extras == {"stop_reason": "end_turn", "metrics": {"steps": 3}}


def test_the_input_may_be_the_rollout_itself():
    assert read(fields(input_id="task-a.1")).task_id == "task-a"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_id": ...}, "input_id"),
        ({"input_id": "task-b"}, "input_id"),
        ({"input_id": ["task-a"]}, "input_id"),
        ({"status_code": "200"}, "status_code"),
        ({"status_code": True}, "status_code"),
        ({"status_code": 200.5}, "status_code"),
        ({"stop_reason": 5}, "stop_reason"),
        ({"rewards": ...}, "rewards"),
        ({"rewards": "1"}, "rewards"),
        ({"rewards": True}, "rewards"),
        ({"rewards": []}, "rewards"),
        ({"rewards": [0, 0, 1]}, "rewards"),
        ({"rewards": [None, 1]}, "rewards.0"),
        ({"rewards": [1, float("nan")]}, "rewards.1"),
        ({"rewards": [float("inf")]}, "rewards.0"),
        ({"rewards": 10**30}, "object"),
        ({"metrics": [2**64]}, "object"),
        ({"rollout_data": ...}, "rollout_data"),
        ({"rollout_data": []}, "rollout_data"),
        ({"rollout_data": {"formatted_request": {}}}, "rollout_data"),
        ({"rollout_data": [5]}, "rollout_data.0.formatted_request"),
        ({"rollout_data": [{}]}, "rollout_data.0.formatted_request"),
        ({"rollout_data": [turn(USER, ANSWER), {"formatted_request": []}]}, "rollout_data.1.formatted_request"),
        ({"rollout_data": [turn()]}, "rollout_data.0.formatted_request.messages"),
        ({"rollout_data": [turn(5)]}, "rollout_data.0.formatted_request.messages"),
        ({"rollout_data": [turn(USER, ANSWER, tools={"a": 1})]}, "rollout_data.0.formatted_request.tools"),
        ({"rollout_data": [turn(USER, ANSWER, tools=[5])]}, "rollout_data, conversation 0: tools.0"),
        ({"rollout_data": [turn({"content": "?"}, ANSWER)]}, "rollout_data, conversation 0: "),
        ({"rollout_data": [turn(USER)]}, "rollout"),
        ({"status_code": 500, "rollout_data": 5}, "rollout_data"),
    ],
)
def test_a_broken_result_names_its_field(changes, field):
    with pytest.raises(ContractError) as caught:
        read(fields(**changes))
    assert caught.value.field.startswith(field)


def test_conversations_are_capped():
    calls = [turn({"role": "user", "content": str(i)}, ANSWER) for i in range(MAX_CONVERSATIONS + 1)]
    assert len(read(fields(rollout_data=calls[1:]), 10**7).conversations) == MAX_CONVERSATIONS
    with pytest.raises(ContractError, match="more than 1024 conversations"):
        read(fields(rollout_data=calls), 10**7)


def test_the_cap_comes_before_all_else():
    data = json.dumps(fields()).encode()
    with pytest.raises(ContractError, match=f"has {len(data)} bytes, more than the cap of {len(data) - 1}"):
        read(data, len(data) - 1)


@pytest.mark.parametrize("data", [b"{", b"[]", b"", b"{}", b'{"a": 1}', b'{"rewards": ' + b"[" * 100_000])
def test_what_is_of_neither_form_is_refused_as_before(data):
    with pytest.raises(ContractError) as caught:
        read(data)
    with pytest.raises(ContractError) as alone:
        Rollout.decode(data, 100_000)
    assert str(caught.value) == str(alone.value)


@pytest.mark.parametrize("form", [Rollout.encode, Rollout.to_json])
def test_the_contracts_own_forms_are_read_as_ever(form, make_rollout):
    rollout = make_rollout("task-a.1", extras={"rewards": [1], "status_code": 500})
    assert read(form(rollout)).encode() == rollout.encode()


def test_any_value_in_any_place_is_read_or_refused():
    random.seed(5)
    values = [None, True, -1, 10**30, 1e308, "", "x" * 50, [], [[]], {}, {"role": 5}, {"messages": None}]

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(place for key, item in inner for place in places(item, (*path, key)))]

    for path in places(fields()):
        if not path:
            continue
        for value in random.sample(values, 6):
            changed = copy.deepcopy(fields())
            at: Any = changed
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            try:
                rollout = read(changed)
            except ContractError:
                continue
            assert not rollout.trainable
            assert Rollout.decode(rollout.encode()) == rollout
