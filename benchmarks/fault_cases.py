"""The faults that `benchmarks/faults.py` inflicts on each system, and why some cannot meet one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollout_backend.testing.fault_proxy import Fault, Rule

OUTAGE_S = 60.0
OURS, BY_S3, BY_HTTP = "ours", "toolkit, S3", "toolkit, HTTP"
LIGHTNING, VERL, SKYRL = "agentlightning", "verl's loop", "SkyRL's generator"

_INVOKE, _STOP = "bedrock-agentcore:InvokeAgentRuntime", "bedrock-agentcore:StopRuntimeSession"
_QUEUE = ("sqs_down", "message_lost", "poison_messages", "foreign_run")
_RUNTIME = ("invoke_429", "invoke_cut", "stop_500")
_AWS = ("clock", "credentials")
_CONTAINERS = ("agent_dies", "foreign_container", "forged_tokens")


def _each(names: Iterable[str], reason: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


def _in_the_trainer(agents: str) -> dict[str, str]:
    """Return the faults that a system cannot meet whose agents run in the trainer's processes, as `agents`."""
    return {
        **_each(_QUEUE, "no queue"),
        **_each(_RUNTIME, "no runtime"),
        **_each(_AWS, "signs nothing"),
        **_each(_CONTAINERS, f"no containers: its agents are {agents} of the trainer"),
        **_each(("body_cut", "s3_slow_down", "published_twice", "truncated_object"), "results stay in memory"),
    }


@dataclass(frozen=True)
class System:
    """A system, which a program in `rivals/` uses. docs/fault-bench.md says how to add one."""

    program: str
    way: str = "step_with_faults"
    on_aws: bool = False
    """Its agents are those of `faulty_agents.py`. Otherwise `run_agents` of its program may start them."""
    beside: bool = False
    """Its program has `run_agents`, which the benchmark runs beside the trainer, behind the proxy."""
    results: tuple[str, str] = ("*", "*")
    """The operation and the path of the calls that fetch a result, as patterns of `Rule`."""
    more_s: float = 0.0
    """Added to an agent's limit, where the limit includes the start of a process."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """The faults that the system cannot meet: why."""


SYSTEMS = {
    OURS: System("ours", on_aws=True, results=("s3:GetObject", "*/steps/*")),
    BY_S3: System(
        "toolkit",
        "step_by_s3",
        on_aws=True,
        results=("s3:GetObject", "*"),
        missing=_each(_QUEUE, "no queue") | {"foreign_container": "its containers know no other rollout's key"},
    ),
    BY_HTTP: System(
        "toolkit",
        "step_by_http",
        on_aws=True,
        results=(_INVOKE, "*"),
        missing={
            **_each(_QUEUE, "no queue"),
            **_each(("s3_slow_down", "truncated_object"), "no S3"),
            "published_twice": "asks for one result",
            "foreign_container": "its containers know no other rollout's key",
            "forged_tokens": "its results hold no tokens",
        },
    ),
    LIGHTNING: System(
        "lightning",
        beside=True,
        results=("s3:GetObject", "*/events"),
        more_s=60.0,
        missing={
            **_each(_QUEUE, "no queue"),
            **_each(_RUNTIME, "no runtime: its controller starts agents"),
            **_each(_AWS, "signs nothing"),
            "truncated_object": "no S3",
        },
    ),
    VERL: System("verl_loop", missing=_in_the_trainer("coroutines")),
    SKYRL: System("skyrl_generator", missing=_in_the_trainer("threads")),
}


@dataclass(frozen=True)
class Case:
    """One fault. What agents do is in `faulty_agents.py` and `rivals/`, by the case's name."""

    name: str
    title: str
    rules: tuple[Rule, ...] = ()
    """Of the proxy between trainer and AWS, or between a system's own server and its clients."""
    results_cut: bool = False
    """A quarter of the calls that fetch a result are cut in the middle of the body, each result once."""
    outage: bool = False
    """The rules apply for `OUTAGE_S` once the step has begun, otherwise during the whole step."""
    from_the_start: bool = False
    """The outage begins with its first call, not after the first invoke."""
    restart: bool = False
    """A trainer that the outage has ended is started again after it."""
    kill: bool = False
    """The trainer is killed when half of the agents have finished, and started again."""

    def rules_for(self, system: str) -> list[Rule]:
        if not self.results_cut:
            return [*self.rules]
        operation, path = SYSTEMS[system].results
        return [Rule(operation, Fault.CUT_BODY, share=0.25, once_each=True, path=path)]


def _all_aws(s3: tuple[int, str], others: tuple[int, str]) -> tuple[Rule, ...]:
    return (
        Rule("s3:*", Fault.FAIL, status=s3[0], code=s3[1]),
        Rule("*", Fault.FAIL, status=others[0], code=others[1]),
    )


CASES = (
    Case("none", "no fault"),
    Case("body_cut", "a quarter of the results' bodies are cut in the middle", results_cut=True),
    Case(
        "s3_slow_down",
        "S3, or the store, answers 503 for a minute",
        # The proxy gives the operations of S3 to all calls that are not signed.
        (Rule("s3:*", Fault.FAIL, code="SlowDown"),),
        outage=True,
    ),
    Case(
        "sqs_down",
        "SQS answers 500 for a minute",
        (Rule("sqs:*", Fault.FAIL, status=500, code="InternalError"),),
        outage=True,
    ),
    Case("published_twice", "each result is published and announced twice"),
    Case("message_lost", "a quarter of the announcements are lost"),
    Case("poison_messages", "the queue holds messages that are no announcements"),
    Case("foreign_run", "results of another run, and of a rollout that was not planned, are announced"),
    Case(
        "invoke_429",
        "the runtime refuses invokes for a minute (429)",
        (Rule(_INVOKE, Fault.FAIL, status=429, code="ThrottlingException"),),
        outage=True,
        from_the_start=True,
    ),
    Case(
        "invoke_cut",
        "a quarter of the invokes begin a session, and their answers are lost",
        (Rule(_INVOKE, Fault.CUT_AFTER, share=0.25, once_each=True),),
    ),
    Case(
        "stop_500",
        "the runtime refuses stops for a minute (500)",
        (Rule(_STOP, Fault.FAIL, status=500, code="InternalServerException"),),
        outage=True,
    ),
    Case("agent_raises", "a quarter of the agents raise an exception"),
    Case("agent_dies", "a quarter of the containers die silently"),
    Case("agent_freezes", "a quarter of the containers freeze"),
    Case("agent_late", "a quarter of the agents take longer than their limit"),
    Case("reward_nan", "a quarter of the agents return NaN as their reward"),
    Case("truncated_object", "a quarter of the results are stored in half"),
    Case("foreign_container", "a hostile container writes the result of another rollout"),
    Case("forged_tokens", "a hostile container publishes tokens that it did not sample"),
    Case(
        "clock",
        "the trainer's clock is an hour off for a minute",
        _all_aws((403, "RequestTimeTooSkewed"), (403, "InvalidSignatureException")),
        outage=True,
    ),
    Case(
        "credentials",
        "credentials expire; what ended over it starts again with new ones",
        _all_aws((400, "ExpiredToken"), (403, "ExpiredTokenException")),
        outage=True,
        restart=True,
    ),
    Case("trainer_killed", "the trainer is killed in the middle of a step, and started again", kill=True),
)
BY_NAME = {case.name: case for case in CASES}
