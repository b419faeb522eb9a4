from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollout_backend.model.rendering.token_bytes import ClearTokens, Stop, StopStrings


def test_the_string_that_completes_first_counts_even_within_a_token():
    assert StopStrings(["e", "ne "], {0: b"one "}).find([0]) == Stop(1, "e")


def test_a_token_that_is_no_text_matches_nothing():
    assert StopStrings(["end"], {0: b"<end>", 1: b"end"}, silent_tokens=[0]).find([0, 1]) == Stop(2, "end")


def test_the_work_grows_with_the_new_tokens_alone():
    read: Counter[int] = Counter()

    class Read(dict):
        def get(self, token, default):
            read[token] += 1
            return super().get(token, default)

    ids = [0] * 1000
    clear = ClearTokens(StopStrings(["e" * 1000, "f" * 1000], Read({0: b"one"})))
    for n in range(len(ids)):
        assert clear.count(ids[:n]) == max(n - 1, 0)
    assert read[0] < 3 * len(ids)


text = st.text(alphabet="ab\u00e9", max_size=12)


@given(text, st.lists(text.filter(len), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_no_part_of_a_stop_string_is_clear_to_send(said, strings, random):
    whole, cuts = said.encode(), []
    while sum(map(len, cuts)) < len(whole):
        at = sum(map(len, cuts))
        cuts.append(whole[at : at + random.randint(1, 4)])
    stops = StopStrings(strings, dict(enumerate(cuts)))
    ids = list(range(len(cuts)))
    found = stops.find(ids)
    ends = [whole.find(s.encode()) + len(s.encode()) for s in strings if s.encode() in whole]
    assert (found is None) == (not ends)
    if found is not None:
        assert len(b"".join(cuts[: found.tokens - 1])) < min(ends) <= len(b"".join(cuts[: found.tokens]))
    clear = ClearTokens(stops)
    for n in range(found.tokens if found else len(ids)):
        begins = whole.find(found.string.encode()) if found else len(whole)
        assert len(b"".join(cuts[: clear.count(ids[:n])])) <= begins
