"""For which processors ECR's images are built."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from rollout_backend.agents.runtimes.agentcore.architecture import Built, ask_ecr, check_runtime, describe_unfit
from rollout_backend.agents.runtimes.agentcore.provision import RuntimeSpec
from tests.emulators.ecr_emulator import REGISTRY, EcrEmulator

IMAGE = f"{REGISTRY}/team/tasks:1"


@pytest.fixture
async def ecr(local_keys: None) -> AsyncIterator[EcrEmulator]:
    async with EcrEmulator() as emulator:
        yield emulator


async def ask(ecr: EcrEmulator, *images: str) -> list[Built]:
    found = await ask_ecr(images, endpoint_url=ecr.url, public_url=ecr.url)
    return [found[image] for image in images]


@pytest.mark.parametrize(("image", "kind"), [(IMAGE, "docker"), ("public.ecr.aws/team/tasks:1", "oci")])
@pytest.mark.parametrize(
    ("pushed", "unfit"),
    [
        (("amd64",), True),
        (("arm64",), False),
        (("amd64", "arm64"), False),
        (("amd64", "unknown"), True),
        (("arm64", ""), False),
    ],
)
async def test_lists_and_single_manifests_name_the_architecture(ecr, image, kind, pushed, unfit):
    ecr.push(image, *pushed, kind=kind)
    [built] = await ask(ecr, image)
    assert built == Built(frozenset(pushed) - {"unknown", ""})
    assert built.is_unfit is unfit


async def test_an_image_is_found_by_its_digest(ecr):
    digest = ecr.push(IMAGE, "amd64")
    unpinned = IMAGE.rpartition(":")[0]
    both, latest = await ask(ecr, f"{IMAGE}@{digest}", unpinned)
    assert both.architectures == {"amd64"}
    assert latest.is_missing, "there is no tag latest"
    assert "built for amd64, and AgentCore runs arm64 only" in describe_unfit(IMAGE, both)


async def test_what_a_tag_names_now_is_no_proof_of_what_a_runtime_runs(ecr):
    pinned = f"{IMAGE}@{ecr.push(IMAGE, 'amd64')}"
    spec = RuntimeSpec.read({})
    found = [await check_runtime(replace(spec, image=image), ecr.url) for image in (IMAGE, pinned)]
    assert [each.level for each in found] == ["warning", "problem"]
    assert ["unless the tag has moved" in each.text for each in found] == [True, False]


async def test_hundreds_of_images_take_a_call_per_hundred_and_one_per_config(ecr):
    images = [f"{IMAGE}-{i}" for i in range(250)]
    for i, image in enumerate(images):
        ecr.push(image, "amd64" if i % 2 else "arm64")
    assert [each.is_unfit for each in await ask(ecr, *images)] == [bool(i % 2) for i in range(250)]
    assert ecr.calls == {"BatchGetImage": 3, "GetDownloadUrlForLayer": 250, "layer": 250}


@pytest.mark.parametrize("refused", ["BatchGetImage", "GetDownloadUrlForLayer"])
async def test_what_may_not_be_asked_is_unknown(ecr, refused):
    ecr.push(IMAGE, "amd64")
    ecr.push(f"{IMAGE}-list", "arm64", "amd64")
    ecr.refused = {refused}
    single, several = await ask(ecr, IMAGE, f"{IMAGE}-list")
    assert (single.is_unfit, single.is_missing) == (False, False)
    assert f"AccessDeniedException: not authorized to perform: ecr:{refused}" in single.unknown
    assert bool(several.unknown) is (refused == "BatchGetImage"), "a list needs no config"


async def test_what_is_not_there_or_cannot_be_read_is_unknown(ecr):
    ecr.push(IMAGE, "amd64", config=b"{")
    ecr.push(f"{IMAGE}-2", "", "amd64")
    ecr.push("public.ecr.aws/team/agent:1", "arm64")
    others = [f"{REGISTRY}/none:1", f"{IMAGE}-3", "public.ecr.aws/team/none:1", "python:3.12"]
    *unreadable, repository, tag, public, elsewhere = await ask(ecr, IMAGE, f"{IMAGE}-2", *others)
    assert [each.unknown for each in unreadable] == [
        "its manifest cannot be read",
        "its manifest does not name an architecture",
    ]
    assert [each.is_missing for each in (repository, tag, public, elsewhere)] == [True, True, True, False]
    assert not any(each.is_unfit for each in (*unreadable, repository, tag, public, elsewhere))
    [unreachable] = (await ask_ecr([IMAGE], endpoint_url="http://127.0.0.1:1")).values()
    assert (unreachable.is_missing, "127.0.0.1:1" in unreachable.unknown) == (False, True)


async def test_moto_answers_the_call_as_the_emulator_does(storage, ecr, local_aws):
    images = [f"{IMAGE}-list", f"{IMAGE}-none"]
    ecr.push(images[0], "amd64", "arm64", kind="docker")
    manifest = ecr.manifest(images[0])
    async with storage.client("ecr") as moto:
        await moto.create_repository(repositoryName="team/tasks")
        await moto.put_image(repositoryName="team/tasks", imageManifest=manifest, imageTag="1-list")
    assert await ask_ecr(images, endpoint_url=storage.endpoint_url) == await ask_ecr(images, endpoint_url=ecr.url)
