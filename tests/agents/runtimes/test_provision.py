"""A runtime made from an image: what is to be done, and real clients doing it against the emulator."""

import asyncio
import dataclasses
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from botocore.model import ServiceModel
from botocore.validate import ParamValidator
from pydantic import ValidationError

from agent_servers import BARE_AGENT, serve_emulator
from builders import eventually, skip, skip_to_end
from rollout_backend.agents.runtimes.agentcore.account import needed_permissions
from rollout_backend.agents.runtimes.agentcore.control import (
    ReadyRuntime,
    control_client,
    pauses,
    pin_endpoint,
)
from rollout_backend.agents.runtimes.agentcore.provision import (
    DEFINITION,
    MARK,
    Action,
    CodeArtifact,
    Plan,
    RuntimeSpec,
    plan,
)
from rollout_backend.agents.runtimes.agentcore.runtime import AgentCoreRuntime
from rollout_backend.base.check_result import CheckResult, raise_problems
from rollout_backend.config import AgentCoreConfig
from rollout_backend.errors import InvokeRejected, PreflightError
from rollout_backend.workbench.deploy.adoption import _READ_ONLY, adopt, adoption_of
from rollout_backend.workbench.local.agentcore_emulator import ROLE
from rollout_backend.workbench.local.control_plane import EndpointRecord, RuntimeRecord
from tests.emulators.ecr_emulator import EcrEmulator

ECR = "000000000000.dkr.ecr.us-east-1.amazonaws.com"
IMAGE, NEWER, MISSING = f"{ECR}/team/my-agent:1", f"{ECR}/team/my-agent:2", f"{ECR}/team/my-agent:missing"
ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/first-0123456789"
PROVIDER = "arn:aws:bedrock-agentcore:us-east-1:000000000000:capacity-provider/mine-0123456789"


VPC = {"subnets": ["subnet-01234567"], "security_groups": ["sg-01234567"]}


def config(**more: object) -> AgentCoreConfig:
    return AgentCoreConfig.model_validate({"image": IMAGE, "role": ROLE, **more})


NAME = config().runtime_name


# --- what is to be done -----------------------------------------------------------------------------------

SPEC = RuntimeSpec.of(config(subnets=["subnet-01234567"], security_groups=["sg-01234567"], environment={"A": "1"}))


def described(**more: object) -> dict[str, Any]:
    """What the service would say of a runtime that is as SPEC wants it."""
    metadata = {"requireMMDSV2": True}
    fixed = {"agentRuntimeName": SPEC.name, "status": "READY", "metadataConfiguration": metadata}
    return {**SPEC.definition(), **fixed, **more}


def wanted(**fields: Any) -> RuntimeSpec:
    return dataclasses.replace(SPEC, **fields)


CODE = wanted(image=CodeArtifact("bucket", "code/agent/1.zip", "3.12"))
PUBLIC = wanted(subnets=frozenset(), security_groups=frozenset())
TWO_SUBNETS = {"subnets": ["subnet-89abcdef", "subnet-01234567"], "securityGroups": ["sg-01234567"]}


@pytest.mark.parametrize(
    ("spec", "actual", "differs"),
    [
        (SPEC, {}, ()),
        (SPEC, {"description": "by hand"}, ()),  # used unchanged, although this backend did not make it
        (
            wanted(subnets=frozenset({"subnet-01234567", "subnet-89abcdef"})),
            {"networkConfiguration": {"networkMode": "VPC", "networkModeConfig": TWO_SUBNETS}},
            (),
        ),
        (PUBLIC, {}, ("subnets", "security_groups")),
        (SPEC, {"metadataConfiguration": None}, ("requireMMDSV2",)),
        (SPEC, {"metadataConfiguration": {"requireMMDSV2": False}}, ("requireMMDSV2",)),
        (SPEC, {"protocolConfiguration": {"serverProtocol": "MCP"}}, ("protocol",)),
        (CODE, {}, ("image",)),
        (SPEC, CODE.definition(), ("image",)),
        (CODE, CODE.definition(), ()),
    ],
)
def test_a_runtime_is_updated_only_if_it_differs(spec, actual, differs):
    found = plan(spec, described(**actual))
    assert (found.action, found.differs) == (Action.UPDATE if differs else Action.READY, differs)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("image", NEWER),
        ("role", ROLE.replace("local", "other")),
        ("subnets", frozenset({"subnet-89abcdef"})),
        ("security_groups", frozenset({"sg-89abcdef"})),
        ("environment", {"A": "2"}),
        ("idle_timeout_s", 600),
        ("max_lifetime_s", 600),
        ("min_memory_mib", 4096),
        ("warmup_path", "/warm"),
        ("capacity_provider", PROVIDER),
    ],
)
def test_each_difference_is_an_update_that_names_it(setting, value):
    spec = wanted(**{setting: value})
    found = plan(spec, described())
    assert (found.action, found.differs) == (Action.UPDATE, (setting,))
    assert plan(spec, described(**spec.definition())).action is Action.READY
    assert plan(spec, described(description="by hand")).action is Action.LEAVE


@pytest.mark.parametrize(
    ("status", "ours", "of_others"),
    [
        ("DELETING", Action.WAIT, Action.WAIT),
        ("A_STATE_OF_NEXT_YEAR", Action.WAIT, Action.WAIT),
        ("CREATE_FAILED", Action.REPLACE, Action.LEAVE),
        ("DELETE_FAILED", Action.REPLACE, Action.LEAVE),
        ("UPDATE_FAILED", Action.UPDATE, Action.LEAVE),
    ],
)
def test_a_runtime_that_is_not_ready_is_changed_only_if_it_failed_and_is_ours(status, ours, of_others):
    assert plan(SPEC, described(status=status)).action is ours
    assert plan(wanted(image=NEWER), described(status=status)).action is ours
    assert plan(SPEC, described(status=status, description="by hand")).action is of_others


def test_the_name_of_a_runtime_follows_from_its_image_unless_it_is_set():
    assert NAME.startswith("rollout_my_agent_")
    assert config(name="mine").runtime_name == "mine"


MODEL = json.loads(Path(__file__).with_name("agentcore_control_model.json").read_text())


def test_the_newest_model_has_no_field_that_an_update_would_lose():
    members = {name: set(shape["members"]) for name, shape in MODEL["shapes"].items() if name in MODEL["roots"]}
    shared, mmds = set(DEFINITION), "metadataConfiguration"
    assert members["CreateAgentRuntimeRequest"] == {*shared, "agentRuntimeName", "clientToken", "tags"}
    assert members["UpdateAgentRuntimeRequest"] == {*shared, "agentRuntimeId", "clientToken", mmds}
    assert members["GetAgentRuntimeResponse"] == {*shared, *_READ_ONLY, mmds} - {"ResponseMetadata"}
    assert shared.isdisjoint(_READ_ONLY), "an adoption would lose it"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"platform_version": "V2", "warmup_path": "/warm", "min_memory_mib": 4096},
        {"capacity_provider": PROVIDER, "max_lifetime_s": 1_209_600, "idle_timeout_s": 1_000_000},
    ],
)
def test_what_is_sent_is_what_the_newest_model_has(more):
    spec = RuntimeSpec.of(config(**more))
    service = ServiceModel({"metadata": {}, "operations": {}, "shapes": MODEL["shapes"]})
    sent = {
        "CreateAgentRuntimeRequest": {"agentRuntimeName": NAME, "tags": {}, **spec.definition()},
        "UpdateAgentRuntimeRequest": {"agentRuntimeId": f"{NAME}-0123456789", **spec.update_of(described())},
    }
    for name, arguments in sent.items():
        errors = ParamValidator().validate(arguments, service.shape_for(name))
        assert not errors.has_errors(), errors.generate_report()
    assert RuntimeSpec.read({**spec.definition(), "agentRuntimeName": NAME}) == dataclasses.replace(
        spec, platform_version=spec.platform_version or "V1"
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"max_lifetime_s": 28_801}, "needs capacity_provider"),
        ({"warmup_path": "/warm", "platform_version": "V1"}, "needs platform V2"),
        (
            {"warmup_path": "/warm", "platform_version": "V2", "capacity_provider": PROVIDER},
            "without capacity_provider",
        ),
        ({"image": "public.ecr.aws/team/agent:1"}, "image_region belongs to an image of public.ecr.aws"),
        ({"image": None, "role": None, "arn": ARN, "platform_version": "V2"}, "platform_version belong to image"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_with_the_reason(more, says):
    with pytest.raises(ValidationError, match=says):
        config(**more)


def test_a_new_runtime_names_its_platform_and_an_old_one_moves_only_forward():
    for more, platform in (({}, "V1"), ({"platform_version": "V2"}, "V2"), ({"warmup_path": "/warm"}, "V2")):
        assert RuntimeSpec.of(config(**more)).definition()["platformVersion"] == platform
    wanted, other = RuntimeSpec.of(config(platform_version="V2")), RuntimeSpec.of(config(platform_version="V1"))
    moved = {"agentRuntimeName": wanted.name, "status": "READY", "metadataConfiguration": {"requireMMDSV2": True}}
    v1, v2 = other.definition() | moved, wanted.definition() | moved
    assert plan(wanted, v1) == Plan(Action.UPDATE, ("platform_version",))
    assert wanted.update_of(v1)["platformVersion"] == "V2"
    assert plan(other, v2) == Plan(Action.LEAVE, ("platform_version",))
    for unnamed in (v1, v2):
        assert plan(RuntimeSpec.of(config()), unnamed).action is Action.READY
        assert RuntimeSpec.of(config()).update_of(unnamed)["platformVersion"] == unnamed["platformVersion"]
    del v1["platformVersion"]  # as before AgentCore had two
    assert RuntimeSpec.of(config()).update_of(v1)["platformVersion"] == "V1"


def test_an_image_of_ecr_public():
    public = config(image="public.ecr.aws/team/agent:1", image_region="eu-central-1")
    assert (public.region, public.max_sessions) == ("eu-central-1", 2500)
    [invoke] = {
        each.resources[0] for each in needed_permissions(public) if each.action.endswith("InvokeAgentRuntime")
    }
    assert invoke.startswith(f"arn:aws:bedrock-agentcore:eu-central-1:000000000000:runtime/{public.runtime_name}-")


# --- doing it ---------------------------------------------------------------------------------------------


class Cloud:
    def __init__(self, url: str, control: Any = None) -> None:
        self.url = url
        self.control = control  # the emulator's
        self.told: list[str] = []
        self.described: dict[str, str] = {}
        self.findings: Sequence[CheckResult] = ()

    def config(self, **more: object) -> AgentCoreConfig:
        return config(**{"endpoint_url": self.url, "ready_timeout_s": 120, **more})

    async def make(self, **more: object) -> str:
        runtime = await AgentCoreRuntime.open(self.config(**more), self.told.append)
        await runtime.aclose()
        return runtime.arn

    async def preview(self, **more: object) -> str | None:
        return await AgentCoreRuntime.preview(self.config(**more))

    def describe(self, arn: str) -> dict[str, Any]:
        """Return a runtime's newest definition, its version and its status."""
        record = self.control.runtimes[arn]
        return {**record.definition, "version": record.version, "status": record.status}

    @property
    def names(self) -> list[str]:
        return [record.name for record in self.control.runtimes.values()]

    async def pin(self, arn: str, version: int, timeout_s: float = 120.0, name: str = "training") -> None:
        async with control_client("us-east-1", self.url) as client:
            await pin_endpoint(client, ReadyRuntime(arn, version), name, timeout_s, self.told.append)

    async def invoke(self, arn: str, qualifier: str = "DEFAULT") -> dict[str, str]:
        config = AgentCoreConfig(arn=arn, endpoint_url=self.config().endpoint_url, qualifier=qualifier)
        runtime = await AgentCoreRuntime.open(config)
        try:
            self.findings = await runtime.check()
            raise_problems(self.findings)
            self.described = runtime.describe()
            return dict(json.loads(await runtime.invoke(f"rollout-{uuid.uuid4().hex}", b"{}")))
        finally:
            await runtime.aclose()


StartCloud = Callable[..., Awaitable[Cloud]]


@pytest.fixture
async def start_cloud(tmp_path: Path, local_keys: None) -> AsyncIterator[StartCloud]:
    async with AsyncExitStack() as stack:

        async def start(**control: object) -> Cloud:
            images = {each: (*BARE_AGENT, each) for each in (IMAGE, NEWER)}
            runtimes = {"command": (*BARE_AGENT, "first"), "images": images}
            serving = serve_emulator(tmp_path, arn=ARN, **runtimes, control={"transition_s": 0.1, **control})
            emulator, url = await stack.enter_async_context(serving)
            return Cloud(url, emulator._control)

        yield start


async def test_a_runtime_is_made_once_and_then_used_as_it_is(start_cloud):
    cloud = await start_cloud()
    # The emulator has no ECR.
    unknown = "; whether it is built for arm64 is not known (404: an answer without a message, HTTP 404)"
    assert await cloud.preview() == f"runtime {NAME}: would be made from {IMAGE}{unknown}"
    with pytest.raises(PreflightError, match=r"not made by this backend.*runtime\.name"):
        await cloud.preview(name="first")
    assert cloud.names == ["first"]
    arn = await cloud.make(environment={"GREETING": "hello"})
    # Made, and then updated: the service makes a runtime that it would refuse to invoke.
    assert cloud.told == [f"making runtime {NAME} from {IMAGE}", f"updating runtime {NAME} (requireMMDSV2)"]
    assert await cloud.invoke(arn) == {"image": IMAGE, "greeting": "hello"}
    made = cloud.describe(arn)
    assert (made["version"], made["description"]) == (2, MARK)
    assert await cloud.preview(environment={"GREETING": "hello"}) == f"runtime {NAME}: there, and ready"
    cloud.told.clear()
    assert await cloud.make(environment={"GREETING": "hello"}) == arn
    assert cloud.told == []
    assert cloud.describe(arn)["version"] == 2


async def test_other_settings_make_a_new_version_that_is_served_at_once(start_cloud):
    cloud = await start_cloud(new_runtimes_require_mmdsv2=True)
    arn = await cloud.make()
    network = {"subnets": ["subnet-01234567"], "security_groups": ["sg-01234567"]}
    wanted = {"image": NEWER, "environment": {"GREETING": "bye"}, **network}
    assert (
        await cloud.preview(**wanted)
        == f"runtime {NAME}: would be updated (image, subnets, security_groups, environment)"
    )
    assert await cloud.make(**wanted) == arn
    assert await cloud.invoke(arn) == {"image": NEWER, "greeting": "bye"}
    described = cloud.describe(arn)
    assert described["version"] == 2
    assert described["networkConfiguration"]["networkModeConfig"]["subnets"] == ["subnet-01234567"]


async def test_an_update_keeps_the_platform_and_what_no_setting_describes(start_cloud):
    cloud = await start_cloud()
    arn = await cloud.make(platform_version="V2", warmup_path="/warm")
    runtime_id, headers = arn.rsplit("/", 1)[1], {"requestHeaderAllowlist": ["X-Ours"]}
    ours = RuntimeSpec.of(cloud.config(platform_version="V2"))
    ports = [{"portRange": {"from": 8100, "to": 8200}}]
    async with control_client("us-east-1", cloud.url) as client:
        by_hand = {**ours.update_of({}), "requestHeaderConfiguration": headers, "allowedPorts": ports}
        await client.update_agent_runtime(agentRuntimeId=runtime_id, **by_hand)
    assert await cloud.make(image=NEWER, min_memory_mib=4096) == arn
    found = cloud.describe(arn)
    assert (found["platformVersion"], found["allowedPorts"]) == ("V2", ports)
    assert found["requestHeaderConfiguration"] == headers
    assert found["resourceConfigurations"] == [{"minimumMemoryInMiB": 4096}]
    assert "hooksConfiguration" not in found  # no longer set
    with pytest.raises(PreflightError, match=r"is not on platform V1, and no change moves it there"):
        await cloud.make(platform_version="V1")


async def test_a_runtime_whose_deletion_failed_is_never_ready(start_cloud):
    cloud = await start_cloud(failing_deletions=1)
    with pytest.raises(PreflightError, match="CREATE_FAILED"):
        await cloud.make(image=MISSING, name=NAME)
    with pytest.raises(PreflightError, match="DELETE_FAILED: The network interfaces could not be released"):
        await cloud.make()
    [arn] = cloud.control.runtimes.keys() - {ARN}
    assert f"runtime {NAME}: DELETE_FAILED; would be deleted and made again from {IMAGE}" in await cloud.preview()
    with pytest.raises(PreflightError, match="DELETE_FAILED, not READY"):
        await cloud.invoke(arn)
    cloud.told.clear()
    made = await cloud.make()
    assert made != arn
    assert cloud.told[0] == f"deleting runtime {NAME}, which is in a failed state"
    assert await cloud.invoke(made) == {"image": IMAGE, "greeting": None}


async def test_a_runtime_is_found_behind_a_page_of_others(start_cloud):
    cloud = await start_cloud()
    for i in range(105):
        cloud.control.add(ARN.replace("first-", f"other_{i}-"), SPEC.definition())
    arn = await cloud.make()
    cloud.told.clear()
    assert await cloud.make() == arn
    assert cloud.told == []


async def test_a_runtime_that_another_run_changes_is_reported(start_cloud, monkeypatch):
    cloud = await start_cloud(new_runtimes_require_mmdsv2=True)
    record = cloud.control.runtimes[await cloud.make()]
    theirs = RuntimeSpec.of(config(environment={"GREETING": "theirs"})).definition()

    def be_changed_once_ready() -> None:
        record.definition, record.version = theirs, record.version + 1
        RuntimeRecord.be_ready(record)

    monkeypatch.setattr(record, "be_ready", be_changed_once_ready)
    with pytest.raises(
        PreflightError, match=r"somebody else .*\(image, environment.*different values of runtime\.name"
    ):
        await cloud.make(image=NEWER)


def test_a_runtime_may_be_in_transition_for_hours():
    assert next(itertools.islice(pauses(), 5000, None)) == 5.0


async def test_a_missing_image_is_reported_and_can_be_corrected(start_cloud):
    cloud = await start_cloud()
    with pytest.raises(PreflightError, match=r"CREATE_FAILED: .*does not exist.*missing.*runtime\.image") as caught:
        await cloud.make(image=MISSING)
    assert ROLE in str(caught.value)
    assert "CREATE_FAILED; would be deleted and made again" in await cloud.preview()
    async with EcrEmulator(cloud.url) as ecr:
        ecr.push(MISSING, "amd64")
        on_ecr = Cloud(ecr.url)
        for change in (on_ecr.preview, on_ecr.make):
            with pytest.raises(PreflightError, match=f"{MISSING} is built for amd64"):
                await change(image=MISSING)
    assert not any(each.startswith("deleting") for each in [*cloud.told, *on_ecr.told])
    arn = await cloud.make()  # the one that failed is deleted first
    assert cloud.told[-3].startswith(f"deleting runtime {NAME}")
    assert await cloud.invoke(arn) == {"image": IMAGE, "greeting": None}


async def test_a_failed_update_is_reported_and_the_old_version_stays_served(start_cloud):
    cloud = await start_cloud()
    arn = await cloud.make()
    with pytest.raises(PreflightError, match=r"UPDATE_FAILED: .*does not exist"):
        await cloud.make(image=MISSING)
    assert await cloud.preview() == f"runtime {NAME}: would be updated (image)"
    assert await cloud.make() == arn
    assert await cloud.invoke(arn) == {"image": IMAGE, "greeting": None}


@pytest.mark.parametrize(
    ("control", "more", "says"),
    [
        (
            {},
            {"role": ROLE.replace("local", "other")},
            r"refuses CreateAgentRuntime: Role validation failed.*runtime\.role",
        ),
        ({"max_runtimes": 1}, {}, r"the maximum\. Delete a runtime"),
        ({}, {"name": "first"}, r"not made by this backend.*runtime\.name"),
    ],
    ids=["the role", "the quota", "another origin"],
)
async def test_what_cannot_be_made_changes_nothing(start_cloud, control, more, says):
    cloud = await start_cloud(**control)
    with pytest.raises(PreflightError, match=says):
        await cloud.make(**more)
    assert cloud.names == ["first"]
    assert cloud.describe(ARN)["version"] == 1


async def test_a_new_runtime_that_is_not_found_at_first_is_made_once(start_cloud):
    cloud = await start_cloud(invisible_s=0.6)
    arns = await asyncio.gather(cloud.make(), cloud.make())
    assert len(set(arns)) == 1
    assert cloud.names.count(NAME) == 1
    assert await cloud.invoke(arns[0]) == {"image": IMAGE, "greeting": None}


async def test_a_runtime_moves_to_v2_when_its_settings_name_it(start_cloud):
    cloud = await start_cloud(calls_per_s=20)
    arn = await cloud.make()
    assert cloud.describe(arn)["platformVersion"] == "V1"
    assert await cloud.make(platform_version="V2") == arn
    assert "updating runtime" in cloud.told[-1]
    assert "platform_version" in cloud.told[-1]
    assert await cloud.make() == arn
    assert cloud.describe(arn)["platformVersion"] == "V2"


@pytest.mark.parametrize(
    ("limits", "more", "says"),
    [
        (
            {"snapshot_s": 3600},
            {"platform_version": "V2", "ready_timeout_s": 1},
            "was not ready after 1 s.*ready_timeout",
        ),
        (
            {"x86_images": [IMAGE]},
            {},
            "CREATE_FAILED: Architecture incompatible.*must be there and be built for arm64",
        ),
        ({"zones": {}}, VPC, "The subnet ID 'subnet-01234567' does not exist.*Correct.*runtime.subnets"),
        ({"zones": {"subnet-01234567": "use1-az3"}}, VPC, "unsupported availability zone use1-az3"),
    ],
)
async def test_what_agentcore_refuses_or_delays_is_named(start_cloud, limits, more, says):
    cloud = await start_cloud(**limits)
    with pytest.raises(PreflightError, match=says):
        await cloud.make(**more)


async def test_a_throttled_control_plane_is_asked_again(start_cloud):
    cloud = await start_cloud(calls_per_s=4)
    assert await cloud.invoke(await cloud.make()) == {"image": IMAGE, "greeting": None}


async def by_hand(cloud: Cloud, **more: object) -> str:
    """Create a runtime as CloudFormation does, with an endpoint pinned to its version. Return its ARN."""
    definition = {name: value for name, value in SPEC.definition().items() if name != "description"} | more
    async with control_client("us-east-1", cloud.url) as client:
        made = await client.create_agent_runtime(agentRuntimeName="by_hand", **definition)
        arn = str(made["agentRuntimeArn"])
    await eventually(lambda: cloud.describe(arn)["status"] == "READY")
    await cloud.pin(arn, 1)
    return arn


async def test_a_runtime_of_another_origin_is_adopted_and_keeps_the_rest(start_cloud):
    cloud = await start_cloud()
    ports, headers = [{"port": 8100}], {"requestHeaderAllowlist": ["X-Ours"]}
    arn = await by_hand(cloud, platformVersion="V2", allowedPorts=ports, requestHeaderConfiguration=headers)
    before = cloud.describe(arn)
    with pytest.raises(InvokeRejected, match="not MMDSv2-enabled"):
        await cloud.invoke(arn)
    texts = {each.fields()["id"]: f"{each.level}: {each.text}" for each in cloud.findings}
    assert texts["runtime-mmdsv2"].startswith("warning: AgentCore does not say whether it requires MMDSv2")
    assert f"rollout deploy --adopt {arn} --yes" in texts["runtime-mmdsv2"]
    assert "all start from one snapshot" in texts["runtime-platform"]
    cloud.told.clear()
    await adopt(arn, cloud.told.append, carry_out=False, endpoint_url=cloud.url)
    assert cloud.told[-1] == "nothing was changed; --yes carries this out"
    assert cloud.describe(arn) == before
    await adopt(arn, cloud.told.append, carry_out=True, endpoint_url=cloud.url)
    assert (await cloud.invoke(arn))["image"] == IMAGE
    assert "endpoint training serves version 1: point it at version 2, or use the endpoint DEFAULT" in cloud.told
    after = cloud.describe(arn)
    changed = {name for name in after.keys() | before.keys() if after.get(name) != before.get(name)}
    assert changed == {"metadataConfiguration", "version"}
    cloud.told.clear()
    await adopt(arn, cloud.told.append, carry_out=True, endpoint_url=cloud.url)
    assert "it requires MMDSv2 already, so nothing is changed" in cloud.told
    assert cloud.describe(arn)["version"] == 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"fieldOfNextYear": {"a": 1}}, "has fieldOfNextYear, which this version does not know"),
        ({"protocolConfiguration": {"serverProtocol": "MCP"}}, "serves MCP"),
    ],
)
def test_a_runtime_that_an_update_would_harm_is_not_adopted(more, says):
    with pytest.raises(PreflightError, match=says):
        adoption_of({"status": "READY", **SPEC.definition(), **more})


async def test_a_wait_has_an_end(start_cloud):
    async def is_being_made() -> bool:
        return await cloud.preview() == f"runtime {NAME}: CREATING"

    cloud = await start_cloud(transition_s=1e6)
    making = asyncio.create_task(cloud.make())
    await eventually(is_being_made)
    skip(121)
    with pytest.raises(PreflightError, match=r"not ready after 120 s.*runtime\.ready_timeout_s"):
        await making
    assert await is_being_made()


async def test_a_control_plane_that_does_not_answer(local_keys):
    with pytest.raises(PreflightError, match="cannot be reached"):
        await skip_to_end(AgentCoreRuntime.preview(config(endpoint_url="http://127.0.0.1:9")))


async def test_a_pinned_endpoint_serves_its_version_whatever_is_deployed_later(start_cloud):
    cloud = await start_cloud()
    arn = await cloud.make()
    await cloud.pin(arn, 2)
    assert cloud.told[-1] == "making endpoint training for version 2"
    await cloud.make(image=NEWER)
    images = [(await cloud.invoke(arn, qualifier))["image"] for qualifier in ("training", "DEFAULT")]
    assert images == [IMAGE, NEWER]
    cloud.told.clear()
    await cloud.pin(arn, 2)
    assert cloud.told == []
    await cloud.pin(arn, 3)
    assert cloud.told == ["moving endpoint training from version 2 to 3"]
    assert (await cloud.invoke(arn, "training"))["image"] == NEWER
    assert (cloud.described["qualifier"], cloud.described["version"]) == ("training", "3")


async def test_an_endpoint_that_agentcore_refuses(start_cloud):
    cloud = await start_cloud()
    arn = await cloud.make()
    with pytest.raises(PreflightError, match=r"endpoint training .* has no version 9"):
        await cloud.pin(arn, 9)
    with pytest.raises(PreflightError, match=r"did not serve version 2 after 0 s"):
        await cloud.pin(arn, 2, timeout_s=0.0)
    cloud.control.runtimes[arn].endpoints |= {f"e{i}": EndpointRecord(f"e{i}", 2) for i in range(9)}
    with pytest.raises(PreflightError, match="10 endpoints"):
        await cloud.pin(arn, 2, name="one_more")
