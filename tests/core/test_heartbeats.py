"""Which sessions are lost, by the heartbeats at the gateways. Heartbeats are due every 15 s, polls every 3 s."""

from itertools import count

import pytest

from rollout_backend.core.session_ends import HeartbeatReport, Heartbeats

EVERY_S = 15.0


class Bench:
    """Sessions that beat on time, except those in `dead`."""

    def __init__(self, *sessions: str, gateways: int = 1, same_machine: bool = False) -> None:
        self.heartbeats = Heartbeats(EVERY_S, gateways, same_machine=same_machine)
        self.sessions = sessions
        self.dead: set[str] = set()
        self.now = 1000.0
        self._polls = count()
        for session in sessions:
            self.heartbeats.watch(session)

    def play(self, seconds: float, *, gateway_up: bool = True, heard: bool = True) -> set[str]:
        """Advance the time and return the lost sessions."""
        for _ in range(int(seconds / self.heartbeats.poll_s)):
            self.now += self.heartbeats.poll_s
            due = next(self._polls) % 5
            beats = {s for i, s in enumerate(self.sessions) if heard and i % 5 == due and s not in self.dead}
            self.heartbeats.observe(self.now, [HeartbeatReport(frozenset(beats)) if gateway_up else None])
        return self.heartbeats.lost_sessions


def test_a_session_that_becomes_silent_while_others_beat_is_lost_within_a_minute():
    bench = Bench("a", "b", "c")
    assert bench.play(600) == set()
    bench.dead = {"b"}
    assert bench.play(30) == set()
    assert bench.play(30) == {"b"}
    bench.heartbeats.forget(["b"])
    assert bench.play(600) == set()


def test_an_agent_that_never_sent_a_heartbeat_is_never_lost():
    bench = Bench("a", "by-hand")
    bench.dead = {"by-hand"}
    for _ in range(10):
        bench.now += 3
        bench.heartbeats.observe(bench.now, [HeartbeatReport(calls=frozenset({"by-hand"}))])
    assert bench.play(3600) == set()


def test_a_model_call_counts_as_a_heartbeat():
    bench = Bench("a", "b")
    bench.play(60)
    bench.dead = {"b"}
    for _ in range(10):
        assert bench.play(30) == set()
        bench.heartbeats.observe(bench.now, [HeartbeatReport(calls=frozenset({"b"}))])
    assert bench.play(60) == {"b"}


@pytest.mark.parametrize("outage_s", [20, 120, 290])
def test_silence_of_all_sessions_is_a_network_outage(outage_s):
    bench = Bench("a", "b", "c", "d")
    bench.play(60)
    assert bench.play(outage_s, heard=False) == set()
    assert bench.play(60) == set(), "after an outage the first heartbeat does not make the other sessions late"


@pytest.mark.parametrize("outage_s", [30, 3600])
def test_time_in_which_the_gateway_does_not_answer_does_not_count(outage_s):
    bench = Bench("a", "b")
    bench.play(60)
    assert bench.play(outage_s, gateway_up=False) == set()
    assert bench.play(60) == set()
    bench.dead = {"a"}
    bench.play(20)
    bench.play(outage_s, gateway_up=False)
    assert bench.play(15) == set()
    assert bench.play(45) == {"a"}


def test_a_suspended_machine_misses_no_heartbeat():
    bench = Bench("a", "b", same_machine=True)
    bench.play(60)
    bench.now += 8 * 3600
    assert bench.play(60) == set()
    bench.dead = {"a", "b"}
    assert bench.play(60) == {"a", "b"}, "on one machine no network can be the cause"


def test_all_sessions_are_lost_after_agents_would_have_given_up():
    bench = Bench("a", "b")
    bench.play(60)
    bench.dead = {"a", "b"}
    assert bench.play(290) == set()
    assert bench.play(30) == {"a", "b"}


def test_each_gateways_heartbeats_count_only_for_its_own_sessions():
    heartbeats = Heartbeats(EVERY_S, 2)
    for session in ("a", "b"):
        heartbeats.watch(session)
    beats = [HeartbeatReport(frozenset({"a"})), HeartbeatReport(frozenset({"b"}))]
    for i in range(20):
        heartbeats.observe(3.0 * i, beats)
    for i in range(20, 60):
        heartbeats.observe(3.0 * i, [beats[0], HeartbeatReport()])
    assert heartbeats.lost_sessions == set(), "the second gateway is cut off from the network"
    for i in range(60, 100):
        heartbeats.observe(3.0 * i, [beats[0], HeartbeatReport(frozenset({"unwatched"}))])
    assert heartbeats.lost_sessions == {"b"}


def test_a_session_that_beats_again_is_not_lost():
    bench = Bench("a", "b")
    bench.play(60)
    bench.dead = {"a"}
    assert bench.play(60) == {"a"}
    bench.dead = set()
    assert bench.play(15) == set()


def test_a_session_whose_container_was_replaced_by_a_repeated_invoke_is_not_lost():
    bench = Bench("a", "b")
    bench.play(60)
    bench.dead = {"a"}
    assert bench.play(60) == {"a"}
    bench.heartbeats.watch("a")
    assert bench.play(15) == set()
    bench.dead = set()
    assert bench.play(60) == set()
    bench.dead = {"a"}
    assert bench.play(60) == {"a"}


def test_a_container_that_dies_at_a_repeated_invoke_is_lost():
    """It sent heartbeats before, so they are due once it has accepted, but not while it may still be starting."""
    bench = Bench("a", "b", "new")
    bench.dead = {"new"}
    bench.play(60)
    bench.dead = {"a", "new"}
    for session in ("a", "new"):
        bench.heartbeats.watch(session)
    assert bench.play(600) == set()
    for session in ("a", "new"):
        bench.heartbeats.expect(session)
    assert bench.play(30) == set()
    assert bench.play(30) == {"a"}
