"""What training gets of conversations that are no straight line. Rows and trained tokens are counted by hand.

The model is byte-level: a reply of n ASCII letters is n tokens and its end token, n + 1.
"""

import json

import pytest

from rollout_backend.local.scripted import ScriptedEngine, ToolCall

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = ToolCall("look", {"at": "it"})
CALL_TOKENS = len(str(CALL)) + 1


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


class Agent:
    """One conversation; several may share a key."""

    def __init__(self, client, *messages: dict, tools=None) -> None:
        self._client = client
        self.messages = list(messages)
        self._more = {"tools": tools} if tools else {}

    def ask(self, *messages: dict):
        self.messages += messages
        reply = self._client.chat.completions.create(model="scripted", messages=self.messages, **self._more)
        self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        return self.messages[-1]

    def result(self, text: str) -> dict:
        call = next(m for m in reversed(self.messages) if m.get("tool_calls"))["tool_calls"][0]
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


def one_conversation(client):
    agent = Agent(client, system("s"))
    agent.ask(user("a"))
    agent.ask(user("b"))


def a_sub_agent(client):
    """It has a system prompt of its own; its parent goes on where it was."""
    parent = Agent(client, system("Delegate."), user("a"))
    parent.ask()
    child = Agent(client, system("You are a helper."), user("b"))
    child.ask()
    child.ask(user("c"))
    parent.ask(user("the helper says so"))


def a_compaction(client):
    """The history is replaced by a summary, which the model itself wrote."""
    agent = Agent(client, system("s"))
    agent.ask(user("a"))
    agent.ask(user("b"))
    summary = agent.ask(user("Summarise."))["content"]
    agent.messages = [system("s"), user(f"So far: {summary}")]
    agent.ask(user("c"))
    agent.ask(user("d"))


def a_dropped_middle(client):
    """A sliding window: the first exchange is forgotten."""
    agent = Agent(client, system("s"))
    agent.ask(user("a"))
    agent.ask(user("b"))
    del agent.messages[1:3]
    agent.ask(user("c"))


def a_rewritten_tool_call(client):
    """The agent repairs the arguments before it sends the call back."""
    agent = Agent(client, user("a"), tools=TOOLS)
    call = agent.ask()["tool_calls"][0]
    call["function"]["arguments"] = json.dumps({"at": "that"})
    agent.ask(agent.result("seen"))


def a_respelled_tool_call(client):
    """Other spaces in the arguments are no other call."""
    agent = Agent(client, user("a"), tools=TOOLS)
    call = agent.ask()["tool_calls"][0]
    call["function"]["arguments"] = '{ "at":"it" }'
    agent.ask(agent.result("seen"))


def two_interleaved(client):
    first, second = Agent(client, system("s"), user("1")), Agent(client, system("s"), user("2"))
    for n in range(3):
        first.ask(user(f"f{n}"))
        second.ask(user(f"s{n}"))


def a_second_try(client):
    """The same question twice, and the second reply is the one that the agent goes on with."""
    agent = Agent(client, user("a"))
    agent.ask()
    del agent.messages[-1]
    agent.ask()
    agent.ask(user("b"))


def best_of_three(client):
    """Three choices of one prompt, all equal: what goes on with any of them goes on with the last."""
    question = [user("a")]
    reply = client.chat.completions.create(model="scripted", messages=question, n=3)
    agent = Agent(client, *question, reply.choices[1].message.model_dump(exclude_none=True))
    agent.ask(user("b"))


FIRST, ANOTHER, BRANCHED, REWRITTEN = "first_call", "new_conversation", "branched", "history_rewritten"


@pytest.mark.parametrize(
    ("play", "replies", "rows"),
    [
        # each row: why it was opened, its turns, its trained tokens
        (one_conversation, ["x", "yy"], [(FIRST, 2, 5)]),
        (a_sub_agent, ["x", "yy", "zzz", "w"], [(FIRST, 2, 4), (ANOTHER, 2, 7)]),
        (a_compaction, ["x", "yy", "sum", "z", "w"], [(FIRST, 3, 9), (ANOTHER, 2, 4)]),
        (a_dropped_middle, ["x", "yy", "zzz"], [(FIRST, 2, 5), (ANOTHER, 1, 4)]),
        (a_rewritten_tool_call, [CALL, "x"], [(FIRST, 1, CALL_TOKENS), (REWRITTEN, 1, 2)]),
        (a_respelled_tool_call, [CALL, "x"], [(FIRST, 2, CALL_TOKENS + 2)]),
        (two_interleaved, ["a", "bb", "c", "dd", "e", "ff"], [(FIRST, 3, 6), (ANOTHER, 3, 9)]),
        (a_second_try, ["x", "yy", "zzz"], [(FIRST, 1, 2), (BRANCHED, 2, 7)]),
        (best_of_three, ["x", "x", "x", "zzz"], [(FIRST, 1, 2), (BRANCHED, 1, 2), (BRANCHED, 2, 6)]),
    ],
)
def test_rows_and_trained_tokens(serve, bundle, play, replies, rows):
    with ScriptedEngine(replies) as engine:
        gateway = serve(engine.url)
        play(gateway.client())
        prompts = [request["input_ids"] for request in engine.requests]
    segments = gateway.trajectory().segments
    assert [(s.split_reason, len(s.turns), s.sampled_tokens) for s in segments] == rows
    assert sum(s.sampled_tokens for s in segments) == sum(len(str(reply)) + 1 for reply in replies)
    # Each turn was sampled after exactly the tokens that stand before it.
    before = [s.token_ids.tolist()[: turn.start] for s in segments for turn in s.turns]
    assert sorted(before) == sorted(prompts)
    said = sorted(
        bundle.decode(s.token_ids[turn.start : turn.end]).removesuffix("<|im_end|>")
        for s in segments
        for turn in s.turns
    )
    assert said == sorted(map(str, replies))
