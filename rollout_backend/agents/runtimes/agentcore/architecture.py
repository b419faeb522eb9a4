"""Read from ECR which processors an image was built for, before a runtime is created from it.

Invariants:

- An image without an answer from ECR is unknown, and stops nothing: the repository may be a cache of the registry
  that has the image.
- All requests share a deadline, and each answer is read up to a limit.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import aiohttp
from botocore.exceptions import ClientError

from rollout_backend.agents.runtimes.agentcore.provision import CodeArtifact, RuntimeSpec
from rollout_backend.base import aws
from rollout_backend.base.check_result import CheckResult
from rollout_backend.base.formats import count

_ARM64 = "arm64"
_PUBLIC_URL = "https://public.ecr.aws"
_IMAGE = re.compile(
    r"(?:(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?|public\.ecr\.aws)/"
    r"(?P<repository>[^:@]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>.+))?"
)
_MANIFESTS = (
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
)
# Images in a call of BatchGetImage.
_BATCH = 100
_AT_ONCE = 16
# The limits for all calls together, and for one.
_TIMEOUT_S, _CALL_S = 120.0, 30.0
# The limit of registries for a manifest.
_MAX_BYTES = 4 * 1024 * 1024

_GetBlob = Callable[[str], Awaitable[bytes]]


class Built(NamedTuple):
    """The architectures of an image, as registries call them. If there are none, `unknown` says why."""

    architectures: frozenset[str] = frozenset()
    unknown: str = ""
    is_missing: bool = False

    @property
    def is_unfit(self) -> bool:
        return bool(self.architectures) and _ARM64 not in self.architectures


def describe_unfit(image: str, built: Built) -> str:
    return (
        f"image {image} is built for {', '.join(sorted(built.architectures))}, and AgentCore runs {_ARM64} only, "
        "except on the instances of runtime.capacity_provider: build it with docker buildx build --platform "
        f"linux/{_ARM64}, and push it under a new tag"
    )


async def check_images(
    images: Mapping[str, str], endpoint_url: str | None = None
) -> tuple[Mapping[str, str], Sequence[CheckResult]]:
    """Check the image of each task, by the task's id. Return the tasks that are refused, with the reason, and a line
    for each other kind of answer."""
    found = await ask_ecr(images.values(), endpoint_url=endpoint_url)
    unfit = {task: describe_unfit(image, found[image]) for task, image in images.items() if found[image].is_unfit}
    missing = [image for image, built in found.items() if built.is_missing]
    unknown = [image for image, built in found.items() if built.unknown and not built.is_missing]
    lines = []
    if missing:
        text = (
            f"ECR does not find {count(len(missing), 'image')} of tasks, such as {missing[0]}: push it, unless its "
            "repository is a cache of another registry"
        )
        lines.append(CheckResult("warning", "runtime.task_image", text, "task-images-missing"))
    if unknown:
        text = (
            f"whether {count(len(unknown), 'image')} of tasks, such as {unknown[0]}, can run on {_ARM64} is not "
            f"known ({found[unknown[0]].unknown})"
        )
        lines.append(CheckResult("unchecked", "runtime.task_image", text, "task-images-unknown"))
    if fit := sum(_ARM64 in built.architectures for built in found.values()):
        text = f"{count(fit, 'image')} of tasks can run on {_ARM64}"
        lines.append(CheckResult("ok", "runtime.task_image", text, "task-images"))
    return unfit, lines


async def check_runtime(spec: RuntimeSpec, endpoint_url: str | None) -> CheckResult:
    """Check what a runtime runs that exists."""
    name, setting = "runtime-architecture", "runtime.arn"
    if isinstance(spec.image, CodeArtifact):
        return CheckResult("ok", setting, "it runs code, which needs no image", name)
    built = Built(unknown="it runs on instances of yours")
    if spec.capacity_provider is None:
        built = (await ask_ecr([spec.image], endpoint_url=endpoint_url))[spec.image]
    if built.is_unfit:
        text = describe_unfit(spec.image, built)
        if "@" in spec.image:
            return CheckResult("problem", setting, text, name)
        return CheckResult("warning", setting, f"{text}, unless the tag has moved since the runtime was made", name)
    if built.unknown:
        text = f"whether its image {spec.image} can run there is not known ({built.unknown})"
        return CheckResult("unchecked", setting, text, name)
    return CheckResult("ok", setting, f"its image can run on {_ARM64}", name)


async def ask_ecr(
    images: Iterable[str], *, endpoint_url: str | None = None, public_url: str = _PUBLIC_URL
) -> dict[str, Built]:
    """Return for which architectures each image was built. `endpoint_url` is that of ECR if not AWS's, `public_url`
    that of ECR Public."""
    named = {image: _IMAGE.fullmatch(image) for image in images}
    found = {image: Built(unknown="it is not in ECR") for image, match in named.items() if match is None}
    repositories: dict[tuple[str, str, str], list[re.Match[str]]] = defaultdict(list)
    for match in named.values():
        if match is not None:
            repositories[match["account"], match["region"], match["repository"]].append(match)
    timeout = aiohttp.ClientTimeout(total=_CALL_S)
    try:
        async with AsyncExitStack() as stack, asyncio.timeout(_TIMEOUT_S):
            http = await stack.enter_async_context(
                aiohttp.ClientSession(trust_env=True, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())
            )
            at_once, clients, asking = asyncio.Semaphore(_AT_ONCE), dict[str, Any](), []
            for (account, region, repository), matches in repositories.items():
                if account is None:
                    asking += [_ask_public(http, public_url, match, at_once) for match in matches]
                    continue
                if region not in clients:
                    made = aws.client("ecr", region=region, endpoint_url=endpoint_url, retries=2)
                    clients[region] = await stack.enter_async_context(made)
                place = {"registryId": account, "repositoryName": repository}
                asking += [
                    _ask_private(http, clients[region], place, matches[i : i + _BATCH], at_once)
                    for i in range(0, len(matches), _BATCH)
                ]
            for answer in await asyncio.gather(*asking):
                found |= answer
    except TimeoutError:
        found |= dict.fromkeys(
            named.keys() - found.keys(), Built(unknown=f"no answer of ECR within {_TIMEOUT_S:g} s")
        )
    except aws.CALL_ERRORS as error:
        # A client could not be opened.
        found |= dict.fromkeys(named.keys() - found.keys(), Built(unknown=aws.reason(error)))
    return found


async def _ask_private(
    http: aiohttp.ClientSession,
    client: Any,
    place: Mapping[str, str],
    matches: Sequence[re.Match[str]],
    at_once: asyncio.Semaphore,
) -> dict[str, Built]:
    """Ask ECR about images of one repository."""
    wanted = {match.string: match["digest"] or match["tag"] or "latest" for match in matches}
    ids = [
        {"imageDigest" if ref.startswith("sha256:") else "imageTag": ref} for ref in dict.fromkeys(wanted.values())
    ]
    try:
        async with at_once:
            answer = await client.batch_get_image(**place, imageIds=ids, acceptedMediaTypes=[*_MANIFESTS])
    except aws.CALL_ERRORS as error:
        missing = isinstance(error, ClientError) and aws.code_of(error) == "RepositoryNotFoundException"
        return dict.fromkeys(wanted, Built(unknown=aws.reason(error), is_missing=missing))
    manifests = {ref: each["imageManifest"] for each in answer["images"] for ref in each["imageId"].values()}

    async def get(digest: str) -> bytes:
        place_of = await client.get_download_url_for_layer(**place, layerDigest=digest)
        return await _get(http, place_of["downloadUrl"])

    async def read(ref: str) -> Built:
        if ref not in manifests:
            return Built(unknown="ECR does not find it", is_missing=True)
        async with at_once:
            return await _read(manifests[ref], get)

    return dict(zip(wanted, await asyncio.gather(*map(read, wanted.values())), strict=True))


async def _ask_public(
    http: aiohttp.ClientSession, url: str, match: re.Match[str], at_once: asyncio.Semaphore
) -> dict[str, Built]:
    """Ask ECR Public as Docker does, without credentials."""
    place = f"{url}/v2/{match['repository']}"
    async with at_once:
        try:
            token = json.loads(await _get(http, f"{url}/token/?service=public.ecr.aws&scope=aws"))["token"]
            headers = {"Authorization": f"Bearer {token}", "Accept": ", ".join(_MANIFESTS)}
            reference = match["digest"] or match["tag"] or "latest"
            manifest = await _get(http, f"{place}/manifests/{reference}", headers)
            built = await _read(manifest, lambda digest: _get(http, f"{place}/blobs/{digest}", headers))
        except aiohttp.ClientResponseError as error:
            built = Built(unknown=f"ECR Public: {error.status} {error.message}", is_missing=error.status == 404)
        except (*aws.CALL_ERRORS, ValueError, LookupError, TypeError) as error:
            built = Built(unknown=f"ECR Public: {aws.reason(error)}")
    return {match.string: built}


async def _read(manifest: str | bytes, get: _GetBlob) -> Built:
    """Return the architectures of a list's manifests, or the one in the config of a single manifest."""
    try:
        found = json.loads(manifest)
        if "manifests" in found:
            platforms = [each.get("platform") or {} for each in found["manifests"]]
        else:
            platforms = [json.loads(await get(found["config"]["digest"]))]
        linux = [each.get("architecture", "") for each in platforms if each.get("os", "linux") == "linux"]
    except aws.CALL_ERRORS as error:
        return Built(unknown=aws.reason(error))
    except (ValueError, LookupError, TypeError, AttributeError):
        return Built(unknown="its manifest cannot be read")
    if "" in linux and _ARM64 not in linux:
        # A list need not name platforms.
        return Built(unknown="its manifest does not name an architecture")
    return Built(frozenset(linux) - {""}) if linux else Built(unknown="it is not built for Linux")


async def _get(http: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None) -> bytes:
    async with http.get(url, headers=headers, raise_for_status=True) as reply:
        return await aws.read_up_to(reply, _MAX_BYTES)
