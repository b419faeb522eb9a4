"""SageMaker's job runtime at the gateway, called by botocore's client of the service."""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import boto3
import botocore.session
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from itsdangerous.encoding import base64_encode

from builders import Clock, user
from rollout_backend.core.session_key import expand, issue, shorten, verify
from rollout_backend.model.dialects import sagemaker_job_runtime as dialect
from rollout_backend.model.gateway import job_runtime
from rollout_backend.model.gateway.access import MAX_HEAD_BYTES, TRAJECTORY_HEADER
from rollout_backend.model.gateway.sessions import journal_writer
from rollout_backend.model.gateway.sessions.journal import SessionJournal
from rollout_backend.model.gateway.sessions.journal_folder import prepare
from rollout_backend.model.gateway.sessions.registry import SessionRegistry
from rollout_backend.model.model_call import ApiError
from rollouts import make_claims

SERVICE = "sagemakerjobruntime"
MODELS = Path(__file__).parent / "botocore_models"
MODEL: dict[str, Any] = json.loads((MODELS / SERVICE / "2026-02-01" / "service-2.json").read_text())
"""The service in botocore 1.44.8, without documentation."""
JOB = "arn:aws:sagemaker:us-east-1:000000000000:job/AgentRFT/run"
CALL = {"model": "any", "messages": [user("What is 2 + 3?")]}
COMPLETE, REWARD = "/complete-rollout", "/update-reward"


@pytest.fixture
def connect(monkeypatch):
    """Return botocore's client of the service, as an agent that knows no other address than its environment's."""

    def connect(gateway) -> Any:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKERJOBRUNTIME", f"{gateway.url}/v1")
        session = botocore.session.Session()
        session.get_component("data_loader").search_paths.append(str(MODELS))
        return boto3.Session("key", "secret", region_name="us-east-1", botocore_session=session).client(
            SERVICE, config=Config(retries={"total_max_attempts": 1}, read_timeout=120)
        )

    return connect


def trajectory_of(gateway, session: str = "s1", **claims: Any) -> dict[str, str]:
    return {"JobArn": JOB, "TrajectoryId": shorten(gateway.key(session, **claims))}


def report(gateway, path: str, session: str = "s1", **fields: Any) -> httpx.Response:
    body = {**trajectory_of(gateway, session), **fields}
    return httpx.post(gateway.url + path, content=json.dumps(body), timeout=120)


def reports(gateway) -> dict[str, Any]:
    """Return the reports of this test's sessions."""

    def get(path: str) -> Any:
        return httpx.get(f"{gateway.url}/control/reports{path}", headers=gateway.control, timeout=120).json()

    own = {name: report for name, report in get("").items() if name.startswith(gateway._prefix)}
    found = {name.removeprefix(gateway._prefix): get(f"/{name}") for name in own}
    for report, summary in zip(found.values(), own.values(), strict=True):
        assert report.pop("age_s") >= summary["age_s"] >= 0
        assert report.pop("has_rewards") == summary["has_rewards"] == (report["rewards"] is not None)
    return found


def test_an_agent_with_boto3_is_served_at_the_endpoint_of_its_environment(play, connect):
    gateway = play(["It is 5.", "Yes."])
    client, place = connect(gateway), trajectory_of(gateway)
    reply = client.sample(**place, Body=json.dumps(CALL).encode())
    answer = json.loads(reply["Body"].read())["choices"][0]["message"]
    assert (reply["ContentType"], answer["content"]) == ("application/json", "It is 5.")
    more = {"messages": [*CALL["messages"], answer, user("Sure?")]}
    streamed = client.sample_with_response_stream(**place, Body=json.dumps({**CALL, **more}).encode())
    events = streamed["Body"].read().decode().split("\n\n")
    assert streamed["ContentType"].startswith("text/event-stream")
    assert [event.partition(": ")[0] for event in events if event] == ["data"] * (len(events) - 1)
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events[:-2]]
    assert ("".join(delta.get("content", "") for delta in deltas), events[-2]) == ("Yes.", "data: [DONE]")
    assert reports(gateway) == {}
    client.complete_rollout(**place)
    assert reports(gateway) == {"s1": {"status": "ready", "rewards": None}}
    client.update_reward(**place, Rewards=[0.25, 1])
    assert reports(gateway) == {"s1": {"status": "ready", "rewards": [0.25, 1.0]}}
    [segment] = gateway.trajectory().segments
    assert [message["content"] for message in segment.messages[1::2]] == ["It is 5.", "Yes."]


def test_the_operations_are_those_of_botocores_model(play):
    gateway = play([])
    shapes = MODEL["shapes"]
    assert MODEL["operations"].keys() == {"Sample", "SampleWithResponseStream", "CompleteRollout", "UpdateReward"}
    for name, operation in MODEL["operations"].items():
        http, members = operation["http"], shapes[operation["input"]["shape"]]["members"]
        answer = httpx.request(http["method"], gateway.url + http["requestUri"], content=b"{}", timeout=120)
        refused_by = {"Sample": 401, "SampleWithResponseStream": 401}.get(name, 400)  # no key, or no trajectory
        assert (answer.status_code, set(answer.json())) == (refused_by, {"__type", "Message"}), name
        place = members["TrajectoryId"]
        if name.startswith("Sample"):
            assert place["locationName"].lower() == TRAJECTORY_HEADER
            assert shapes[operation["input"]["shape"]]["payload"] == "Body"
        else:
            assert "location" not in place
    assert get_args(job_runtime._CompleteRollout.model_fields["status"].annotation) == tuple(
        shapes["CompletionStatus"]["enum"]
    )
    of_reports = {name for each in (job_runtime._CompleteRollout, job_runtime._UpdateReward) for name in _names(each)}
    members = {**shapes["CompleteRolloutRequest"]["members"], **shapes["UpdateRewardRequest"]["members"]}
    assert of_reports == {name for name in members if name not in ("JobArn", "ClientToken")}
    errors = {*dialect._ERRORS.values(), "ValidationException", "InternalServiceError"}
    assert errors <= {name for name, shape in shapes.items() if shape.get("exception")}
    assert shapes["FailureReason"]["max"] == dialect._MAX_MESSAGE


def _names(model: Any) -> set[str]:
    return {field.alias for field in model.model_fields.values()}


@pytest.mark.slow
def test_the_model_is_that_of_an_installed_botocore(agentcore_python):
    [found] = agentcore_python.parents[1].glob(f"lib/*/site-packages/botocore/data/{SERVICE}/*/service-2.json.gz")

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        if not isinstance(value, dict):
            return value
        undocumented = {
            key: item for key, item in value.items() if not isinstance(item, str) or key != "documentation"
        }
        return {key: plain(item) for key, item in undocumented.items()}

    assert plain(json.loads(gzip.decompress(found.read_bytes()))) == MODEL


def test_errors_have_the_classes_of_the_service(play, connect):
    gateway = play([])
    client, place = connect(gateway), trajectory_of(gateway)
    with pytest.raises(client.exceptions.ConflictException, match="call CompleteRollout before"):
        client.update_reward(**place, Rewards=[1.0])
    with pytest.raises(client.exceptions.AccessDeniedException, match="malformed"):
        client.sample(JobArn=JOB, TrajectoryId="another", Body=b"{}")
    with pytest.raises(client.exceptions.AccessDeniedException, match="malformed"):
        client.complete_rollout(JobArn=JOB, TrajectoryId="another")
    with pytest.raises(client.exceptions.ValidationException, match="model"):
        client.sample(**place, Body=b"{}")
    client.complete_rollout(**place)
    with pytest.raises(client.exceptions.ConflictException, match="has completed the rollout"):
        client.sample(**place, Body=json.dumps(CALL).encode())
    with pytest.raises(ClientError, match="Cannot transition trajectory") as caught:
        client.complete_rollout(**place, Status="failed")
    assert caught.value.response["Error"]["Code"] == "ConflictException"


def test_a_report_is_repeated_and_never_changed(play):
    gateway = play([])
    for status, expected in (("ready", 200), ("ready", 200), ("failed", 409)):
        assert report(gateway, COMPLETE, Status=status).status_code == expected
    nan = float("nan")
    for rewards, expected in (([nan, 0.5], 200), ([nan, 0.5], 200), ([0.5], 409), ([nan, 1.0], 409), ([], 409)):
        assert report(gateway, REWARD, Rewards=rewards).status_code == expected
    found = reports(gateway)["s1"]
    assert (found["status"], repr(found["rewards"])) == ("ready", "[nan, 0.5]")
    assert reports(gateway).keys() == {"s1"}


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (REWARD, {"Rewards": [1.0]}, 409),  # not completed
        (REWARD, {}, 400),
        *((REWARD, {"Rewards": rewards}, 400) for rewards in (1.0, None, ["1"], [True], [[1.0]], {"0": 1.0})),
        *((COMPLETE, {"Status": status}, 400) for status in ("done", None, 1)),
        *((COMPLETE, {"TrajectoryId": name}, 401) for name in ("", "x", "\u00e9.\u4e2d", "." * 300, "A" * 2000)),
        *((COMPLETE, {"TrajectoryId": name}, 400) for name in (None, 1, ["x"])),
        (REWARD, {"Rewards": [0] * 10**6}, 413),
        (COMPLETE, {"Status": "x" * 10**6}, 413),
    ],
)
def test_a_report_that_is_not_valid_changes_nothing(play, path, fields, status):
    gateway = play([])
    answer = report(gateway, path, **fields)
    assert (answer.status_code, answer.json().keys()) == (status, {"__type", "Message"})
    assert reports(gateway) == {}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"TrajectoryId": "\\ud800"}', b"[" * 60_000])
def test_a_body_that_is_no_report_is_refused(play, body):
    answer = httpx.post(play([]).url + COMPLETE, content=body, timeout=120)
    assert (answer.status_code, answer.json()["__type"]) == (400, "ValidationException")


def test_an_agent_reports_on_its_own_session_alone(play):
    """An id of another session is its key, and a key in the headers is none of the trajectory's."""
    gateway = play(["5"])
    assert report(gateway, COMPLETE, "other").status_code == 200
    answer = httpx.post(gateway.url + COMPLETE, json={"TrajectoryId": "x"}, headers=gateway.headers(), timeout=120)
    assert answer.status_code == 401
    assert reports(gateway).keys() == {"other"}
    header = {TRAJECTORY_HEADER: trajectory_of(gateway)["TrajectoryId"]}
    assert gateway.post(CALL, "other").status_code == 410
    assert gateway.post(CALL, "other", headers=header).json()["choices"][0]["message"]["content"] == "5"
    assert gateway.post(CALL, headers={TRAJECTORY_HEADER: "x"}).status_code == 401
    assert gateway.post(CALL).status_code == 404  # without the header, the model's name counts


def test_what_was_reported_needs_the_control_key(play):
    gateway = play([])
    for path in ("", "/s1"):
        answer = httpx.get(f"{gateway.url}/control/reports{path}", headers=gateway.headers(), timeout=120)
        assert answer.status_code == 401


def test_reports_end_with_their_sessions(play):
    gateway = play([])
    assert report(gateway, COMPLETE).status_code == 200
    claims = verify(gateway.secret, gateway.key(), 0.0)
    gateway.instruct("revoke", {"session_ids": [claims.session_id]})
    assert reports(gateway) == {}
    for path, fields in ((COMPLETE, {}), (REWARD, {"Rewards": [1.0]})):
        answer = report(gateway, path, **fields)
        assert (answer.status_code, answer.json()["__type"]) == (410, "ConflictException")
    assert gateway.seal().status_code == 410


# --- the journal and keys -------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, bundle: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start the registry of a gateway after the end of the one before."""
    monkeypatch.setattr(journal_writer, "_MEMORY", tmp_path)
    prepare(tmp_path / "run" / "gateway")
    with ExitStack() as running:

        def start(**more: Any) -> SessionRegistry:
            running.close()
            journal = SessionJournal(tmp_path / "run" / "gateway")
            running.callback(journal.release)
            return SessionRegistry(bundle, "m", session_key_s=600.0, journal=journal, **more)

        yield start


async def test_a_restarted_gateway_knows_the_reports_of_its_open_sessions(start):
    registry = start()
    for name in ("done", "completed", "stopped", "open"):
        await registry.open(make_claims(name))
        if name != "open":
            await registry.report(make_claims(name), status="ready")
    await registry.report(make_claims("done"), rewards=[float("inf"), 0.1])
    await registry.revoke(["stopped"])
    before = registry.reports
    again = start()
    assert again.reports == before
    assert again.reports.keys() == {"done", "completed"}
    assert again.reports["done"]["rewards"] == [float("inf"), 0.1]
    await again.report(make_claims("completed"), rewards=[1.0])
    await again.open(make_claims("open"))
    with pytest.raises(ApiError, match="has completed the rollout"):
        await again.open(make_claims("done"))


async def test_a_report_that_cannot_be_recorded_counts_until_the_gateway_ends(start, monkeypatch):
    registry = start()
    with monkeypatch.context() as full:
        full.setattr(SessionJournal, "report", Mock(side_effect=OSError(28, "No space left")))
        await registry.report(make_claims(), status="ready")
    assert registry.reports.keys() == {"s"}
    again = start()
    assert again.reports == {}
    with pytest.raises(ApiError, match="lost with the journal"):
        await again.open(make_claims())


async def test_reports_expire_with_their_keys_and_the_file_stays_small(start, tmp_path):
    clock, file = Clock(), tmp_path / "run" / "gateway" / "reports"
    registry = start(clock=clock)
    for number in range(2000):
        await registry.report(make_claims(f"s{number}", expires_at=50.0), status="ready")
    await registry.report(make_claims("lasting", expires_at=200.0), status="ready")
    size = file.stat().st_size
    clock.now = 100.0
    await registry.sweep()
    await registry.written(make_claims("lasting"))
    assert registry.reports.keys() == {"lasting"}
    assert file.stat().st_size < size / 100


@pytest.mark.parametrize("name", ["r", "swe-agent-2026-11-29", "r" * 60])
def test_a_trajectory_id_is_a_key_of_at_most_256_characters(name):
    """The limit is that of botocore's model."""
    claims = make_claims(
        "rollout-" + "0123456789abcdef" * 4,
        run_id=name,
        step=123,
        rollout_id=f"{name[:30]}.11",
        journal_id="0123456789abcdef",
        trainer_incarnation="fedcba9876543210",
    )
    key = issue("secret" * 8, claims)
    assert len(shorten(key)) <= MODEL["shapes"]["TrajectoryId"]["max"] < len(key)
    assert expand(shorten(key)) == key
    assert verify("secret" * 8, expand(shorten(key)), 0.0) == claims


def test_what_is_no_short_key_stays_and_a_bomb_fills_no_memory():
    for text in ("", "x", "a.b", "a" * MAX_HEAD_BYTES):
        assert expand(text) == text
    packer = zlib.compressobj(9, wbits=-15)
    bomb = packer.compress(bytes(10**7)) + packer.flush()
    assert len(expand(f"{base64_encode(bomb).decode()}.x")) < 20_000
