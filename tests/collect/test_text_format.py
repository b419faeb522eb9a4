"""Results in the older text format: what each field means, and which field an error names."""

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
        "session_id": "s",
        "attempt": 2,
    }
    return {name: value for name, value in {**whole, **changes}.items() if value is not ...}


def read(found: Any, max_bytes: int = 100_000) -> Rollout:
    data = found if isinstance(found, bytes) else json.dumps(found).encode()
    return read_result(data, max_bytes, run_id="run", step=3, rollout_id="task-a.1", text_format=True)


def test_a_result_becomes_a_messages_only_rollout():
    rollout = read(fields())
    assert (rollout.run_id, rollout.step, rollout.task_id, rollout.rollout_id) == ("run", 3, "task-a", "task-a.1")
    assert (rollout.outcome, rollout.reward, rollout.failure) == (Outcome.COMPLETED, 0.5, None)
    assert (rollout.messages_only, rollout.trainable) == (True, False)
    assert (rollout.session_id, rollout.attempt) == ("s", 2)
    assert rollout.extras == {"stop_reason": "end_turn"}
    assert (rollout.started_at, rollout.finished_at) == (0, 0)
    assert Rollout.decode(rollout.encode()) == rollout


def test_calls_that_continue_form_one_conversation_with_each_last_message_sampled():
    [conversation] = read(fields()).conversations
    assert list(conversation.messages) == [USER, CALL, RESULT, ANSWER]
    assert conversation.model_messages == (1, 3)
    assert list(conversation.tools) == TOOLS


def test_an_example_reply_in_the_prompt_is_not_sampled():
    shown = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    [conversation] = read(fields(rollout_data=[turn(*shown, USER, ANSWER)])).conversations
    assert conversation.model_messages == (3,)


def test_a_call_that_continues_no_other_is_a_new_conversation():
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
    assert [one.model_messages for one in found] == [(1, 3), (1,), (3,)]


def test_a_call_without_a_reply_adds_no_reply():
    [conversation] = read(fields(rollout_data=[turn(USER, CALL), turn(USER, CALL, RESULT)])).conversations
    assert conversation.model_messages == (1,)
    assert len(conversation.messages) == 3


@pytest.mark.parametrize(
    ("rewards", "reward"), [(1, 1.0), (-0.5, -0.5), ([0.25], 0.25), ([0.0, 1.0], 1.0), ([1, 0], 0.0)]
)
def test_the_last_reward_is_the_rollouts_reward(rewards, reward):
    assert read(fields(rewards=rewards)).reward == reward


@pytest.mark.parametrize("missing", ["status_code", "stop_reason"])
def test_a_missing_status_code_means_completed(missing):
    assert read(fields(**{missing: ...})).outcome is Outcome.COMPLETED
    assert read(fields(**{missing: None})).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("stop", ["end_turn", "stop", "stop_sequence", "max_tokens", "length"])
def test_normal_stop_reasons_complete_the_rollout(stop):
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
def test_a_failed_rollout_has_no_reward(changes, outcome, reason, words):
    rollout = read(fields(rewards=[1.0], **changes))
    assert (rollout.outcome, rollout.reward, rollout.failure.reason) == (outcome, None, reason)
    assert words in rollout.failure.message
    assert rollout.extras["rewards"] == [1.0]
    assert not rollout.trainable


def test_an_error_needs_no_other_fields():
    rollout = read({"status_code": 500, "stop_reason": "boom", "input_id": "task-a", "session_id": "s", "attempt": 1})
    assert (rollout.outcome, rollout.conversations) == (Outcome.AGENT_ERROR, ())


def test_other_fields_are_kept_as_extras():
    assert read(fields(metrics={"steps": 3})).extras == {"stop_reason": "end_turn", "metrics": {"steps": 3}}


def test_input_id_may_be_the_rollout_id():
    assert read(fields(input_id="task-a.1")).task_id == "task-a"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_id": ...}, "input_id"),
        ({"input_id": "task-b"}, "input_id"),
        ({"input_id": ["task-a"]}, "input_id"),
        ({"session_id": ...}, "session_id"),
        ({"session_id": 5}, "session_id"),
        ({"attempt": ...}, "attempt"),
        ({"attempt": 0}, "attempt"),
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
def test_an_invalid_result_names_its_field(changes, field):
    with pytest.raises(ContractError) as caught:
        read(fields(**changes))
    assert caught.value.field.startswith(field)


def test_without_the_setting_the_format_is_refused_by_the_settings_name():
    data = json.dumps(fields()).encode()
    with pytest.raises(ContractError, match=r"collect\.text_format=true"):
        read_result(data, 100_000, run_id="run", step=3, rollout_id="task-a.1")


def test_a_task_id_that_looks_like_a_rollout_id_is_accepted():
    data = json.dumps(fields(input_id="task.3")).encode()
    found = read_result(data, 100_000, run_id="run", step=3, rollout_id="task.3.0.g2", text_format=True)
    assert found.task_id == "task.3"


def test_the_number_of_conversations_is_limited():
    calls = [turn({"role": "user", "content": str(i)}, ANSWER) for i in range(MAX_CONVERSATIONS + 1)]
    assert len(read(fields(rollout_data=calls[1:]), 10**7).conversations) == MAX_CONVERSATIONS
    with pytest.raises(ContractError, match="more than 1024 conversations"):
        read(fields(rollout_data=calls), 10**7)


def test_the_size_cap_is_checked_first():
    data = json.dumps(fields()).encode()
    with pytest.raises(ContractError, match=f"has {len(data)} bytes, more than the cap of {len(data) - 1}"):
        read(data, len(data) - 1)


@pytest.mark.parametrize("data", [b"{", b"[]", b"", b"{}", b'{"a": 1}', b'{"rewards": ' + b"[" * 100_000])
def test_data_in_no_known_format_is_refused(data):
    with pytest.raises(ContractError) as caught:
        read(data)
    with pytest.raises(ContractError) as alone:
        Rollout.decode(data, 100_000)
    assert str(caught.value) == str(alone.value)


@pytest.mark.parametrize("form", [Rollout.encode, Rollout.to_json])
def test_the_contracts_formats_are_still_read(form, make_rollout):
    rollout = make_rollout("task-a.1", extras={"rewards": [1], "status_code": 500})
    assert read(form(rollout)).encode() == rollout.encode()


def test_any_value_in_any_field_is_read_or_refused():
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
