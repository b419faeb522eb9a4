"""The faults that `benchmarks/faults.py` inflicts on each system, and why some cannot meet one."""

from dataclasses import dataclass, field

from rollout_backend.testing.fault_proxy import Fault, Rule

OUTAGE_S = 60.0
OURS, BY_S3, BY_HTTP, LIGHTNING = "ours", "toolkit, S3", "toolkit, HTTP", "agentlightning"
SYSTEMS = (OURS, BY_S3, BY_HTTP, LIGHTNING)

_NO_QUEUE = "no queue"
_NO_RUNTIME = "no runtime: its agents ask for work"
_NO_AWS = "signs nothing"
_NO_S3 = "no S3"
_OWN_KEYS = "its containers know no other rollout's key"
_NO_TOKENS = "its results hold no tokens"


@dataclass(frozen=True)
class Case:
    """One fault. `rules` are of the proxy between the trainer and AWS, or between agentlightning's agents and store.

    Rules with `outage` apply for OUTAGE_S once the step has begun, others during the whole step. What agents do is in
    `faulty_agents.py`, by the case's name.
    """

    name: str
    title: str
    rules: dict[str, tuple[Rule, ...]] = field(default_factory=dict)
    outage: bool = False
    from_the_start: bool = False  # the outage begins with its first call, not after the first invoke
    restart: bool = False  # a trainer that the outage has ended is started again after it
    kill: bool = False  # the trainer, when half of the agents have finished
    missing: dict[str, str] = field(default_factory=dict)  # systems that cannot meet it: why


def _all_aws(s3: tuple[int, str], others: tuple[int, str]) -> dict[str, tuple[Rule, ...]]:
    rules = (
        Rule("s3:*", Fault.FAIL, status=s3[0], code=s3[1]),
        Rule("*", Fault.FAIL, status=others[0], code=others[1]),
    )
    return dict.fromkeys((OURS, BY_S3, BY_HTTP), rules)


def _of_invokes(rule: Rule) -> dict[str, tuple[Rule, ...]]:
    return dict.fromkeys((OURS, BY_S3, BY_HTTP), (rule,))


_INVOKE, _STOP = "bedrock-agentcore:InvokeAgentRuntime", "bedrock-agentcore:StopRuntimeSession"
_ONLY_OURS = {BY_S3: _NO_QUEUE, BY_HTTP: _NO_QUEUE, LIGHTNING: _NO_QUEUE}
_CUT = {"fault": Fault.CUT_BODY, "share": 0.25, "once_each": True}

CASES = (
    Case("none", "no fault"),
    Case(
        "body_cut",
        "a quarter of the results' bodies are cut in the middle",
        {
            OURS: (Rule("s3:GetObject", path="*/steps/*", **_CUT),),
            BY_S3: (Rule("s3:GetObject", **_CUT),),
            BY_HTTP: (Rule(_INVOKE, **_CUT),),
            LIGHTNING: (Rule("*", **_CUT),),
        },
    ),
    Case(
        "s3_slow_down",
        "S3, or the store, answers 503 for a minute",
        {name: (Rule("s3:*", Fault.FAIL, code="SlowDown"),) for name in (OURS, BY_S3, LIGHTNING)},
        outage=True,
        missing={BY_HTTP: _NO_S3},
    ),
    Case(
        "sqs_down",
        "SQS answers 500 for a minute",
        {OURS: (Rule("sqs:*", Fault.FAIL, status=500, code="InternalError"),)},
        outage=True,
        missing=_ONLY_OURS,
    ),
    Case("published_twice", "each result is published and announced twice", missing={BY_HTTP: "asks for one result"}),
    Case("message_lost", "a quarter of the announcements are lost", missing=_ONLY_OURS),
    Case("poison_messages", "the queue holds messages that are no announcements", missing=_ONLY_OURS),
    Case(
        "foreign_run",
        "results of another run, and of a rollout that was not planned, are announced",
        missing=_ONLY_OURS,
    ),
    Case(
        "invoke_429",
        "the runtime refuses invokes for a minute (429)",
        _of_invokes(Rule(_INVOKE, Fault.FAIL, status=429, code="ThrottlingException")),
        outage=True,
        from_the_start=True,
        missing={LIGHTNING: _NO_RUNTIME},
    ),
    Case(
        "invoke_cut",
        "a quarter of the invokes begin a session, and their answers are lost",
        _of_invokes(Rule(_INVOKE, Fault.CUT_AFTER, share=0.25, once_each=True)),
        missing={LIGHTNING: _NO_RUNTIME},
    ),
    Case(
        "stop_500",
        "the runtime refuses stops for a minute (500)",
        _of_invokes(Rule(_STOP, Fault.FAIL, status=500, code="InternalServerException")),
        outage=True,
        missing={LIGHTNING: _NO_RUNTIME},
    ),
    Case("agent_raises", "a quarter of the agents raise an exception"),
    Case("agent_dies", "a quarter of the containers die silently"),
    Case("agent_freezes", "a quarter of the containers freeze"),
    Case("agent_late", "a quarter of the agents take longer than their limit"),
    Case("reward_nan", "a quarter of the agents return NaN as their reward"),
    Case(
        "truncated_object",
        "a quarter of the results are stored in half",
        missing={BY_HTTP: _NO_S3, LIGHTNING: _NO_S3},
    ),
    Case(
        "foreign_container",
        "a hostile container writes the result of another rollout",
        missing={BY_S3: _OWN_KEYS, BY_HTTP: _OWN_KEYS},
    ),
    Case(
        "forged_tokens", "a hostile container publishes tokens that it did not sample", missing={BY_HTTP: _NO_TOKENS}
    ),
    Case(
        "clock",
        "the trainer's clock is an hour off for a minute",
        _all_aws((403, "RequestTimeTooSkewed"), (403, "InvalidSignatureException")),
        outage=True,
        missing={LIGHTNING: _NO_AWS},
    ),
    Case(
        "credentials",
        "credentials expire; what ended over it starts again with new ones",
        _all_aws((400, "ExpiredToken"), (403, "ExpiredTokenException")),
        outage=True,
        restart=True,
        missing={LIGHTNING: _NO_AWS},
    ),
    Case("trainer_killed", "the trainer is killed in the middle of a step, and started again", kill=True),
)
BY_NAME = {case.name: case for case in CASES}
