"""A model may be named as on the hub: its folder is in the local cache, or downloaded."""

import hashlib
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from builders import served
from rollout_backend.base.child_process import run_child
from rollout_backend.workbench.local.scripted import BYTE_MODEL

COMMIT = "c" * 40
RESOLVE = """
import sys
from rollout_backend.config.model import ModelConfig
from rollout_backend.errors import ConfigError
model = ModelConfig(path="acme/small")
for folder in sys.argv[1:]:
    try:
        found = getattr(model, folder)
        print(model.served_name, *sorted(file.name for file in found.iterdir()), model.context_tokens)
    except ConfigError as error:
        print("ConfigError", error)
"""


def hub(asked: list[str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a model hub with one model, which notes the files that it sends."""
    files = {file.name: file.read_bytes() for file in BYTE_MODEL.iterdir() if file.is_file()}
    files |= {"model.safetensors": b"weights", "config.json": b'{"max_position_embeddings": 64}'}
    siblings = [{"rfilename": name} for name in files]
    tree = [{"type": "file", "path": name, "size": len(body), "oid": "0" * 40} for name, body in files.items()]

    async def answer(request: web.Request) -> web.Response:
        match request.path.strip("/").split("/"):
            case ["api", "models", "acme", "small", "revision", "main"]:
                return web.json_response({"id": "acme/small", "sha": COMMIT, "siblings": siblings})
            case ["api", "models", "acme", "small", "tree", _]:
                return web.json_response(tree)
            case ["acme", "small", "resolve", _, name]:
                if request.method == "GET":
                    asked.append(name)
                tag = hashlib.sha256(files[name]).hexdigest()
                return web.Response(body=files[name], headers={"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})
        return web.Response(status=404)

    return answer


async def resolve(home: Path, endpoint: str, *folders: str) -> list[str]:
    env = os.environ | {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = await run_child([sys.executable, "-c", RESOLVE, *folders], env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().splitlines()


async def test_a_hub_name_is_downloaded_once_and_then_found_in_the_cache(tmp_path):
    asked: list[str] = []
    async with served(hub(asked)) as url:
        without, line = await resolve(tmp_path, url, "folder", "weight_folder")
        assert without.startswith("small ")
        assert "tokenizer.json" in without
        assert "model.safetensors" not in without  # the gateway needs none
        assert "model.safetensors" in line
        assert (asked[-1], len(set(asked))) == ("model.safetensors", len(asked))
    assert await resolve(tmp_path, url, "folder", "weight_folder") == [line, line]  # without the hub


async def test_a_name_that_the_hub_lacks_is_refused(tmp_path):
    async def has_nothing(_: web.Request) -> web.Response:
        return web.Response(status=404)

    async with served(has_nothing) as url:
        [line] = await resolve(tmp_path, url, "folder")
    assert line.startswith("ConfigError model.path: there is no folder acme/small, and no such model on the hub or")
