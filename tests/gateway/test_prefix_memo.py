"""A conversation's digests are those of all its messages, however much of it was digested before."""

import copy
import random

from rollout_backend.gateway.sessions.conversations import PrefixMemo


class Steps:
    """Digest messages as a memo's caller does, and count how many."""

    def __init__(self) -> None:
        self.taken = 0

    def __call__(self, before, messages, i):
        self.taken += 1
        return before + repr(messages[i]["content"]).encode()


def said(*texts: str) -> list[dict]:
    return [{"role": "user", "content": text} for text in texts]


def test_only_new_messages_are_digested():
    memo, steps = PrefixMemo(), Steps()
    assert memo.chain(said("a", "b"), steps) == [b"'a'", b"'a''b'"]
    assert memo.chain(said("a", "b", "c"), steps) == [b"'a'", b"'a''b'", b"'a''b''c'"]
    assert steps.taken == 3


def test_digests_of_another_context_are_not_reused():
    memo, steps = PrefixMemo(), Steps()
    memo.chain(said("a"), steps, context=b"tools")
    memo.chain(said("a"), steps, context=b"other tools")
    assert steps.taken == 2


def test_a_list_that_its_owner_extends_later_changes_nothing():
    memo, messages = PrefixMemo(), said("a")
    memo.chain(messages, Steps())
    messages += said("b")
    assert memo.chain(messages, Steps()) == [b"'a'", b"'a''b'"]


def test_alternating_conversations_give_the_digests_of_a_new_memo():
    numbers, memo = random.Random(3), PrefixMemo()
    conversations = [said("system")]
    for _ in range(300):
        conversation = copy.deepcopy(numbers.choice(conversations))
        if numbers.random() < 0.2:
            conversation[numbers.randrange(len(conversation))]["content"] = "changed"
        del conversation[numbers.randint(1, len(conversation)) :]
        conversation += said(*(numbers.choice("xyz") for _ in range(numbers.randint(0, 3))))
        conversations = [*conversations[-5:], conversation]
        assert memo.chain(conversation, Steps()) == PrefixMemo().chain(conversation, Steps())
