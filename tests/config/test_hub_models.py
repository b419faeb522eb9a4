"""A model may be named as on the hub: its folder is in the local cache, or downloaded."""

import hashlib
import os
import sys
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_backend.child_process import run_child
from rollout_backend.local.scripted import BYTE_MODEL

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


class Hub:
    """A model hub with one model."""

    def __init__(self) -> None:
        self.files = {file.name: file.read_bytes() for file in BYTE_MODEL.iterdir() if file.is_file()}
        self.files |= {"model.safetensors": b"weights", "config.json": b'{"max_position_embeddings": 64}'}
        self.asked: list[str] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/models/acme/small/revision/main", self.describe)
        app.router.add_get("/api/models/acme/small/tree/{commit}", self.list)
        app.router.add_get("/acme/small/resolve/{commit}/{name}", self.send)
        return app

    async def describe(self, _: web.Request) -> web.Response:
        siblings = [{"rfilename": name} for name in self.files]
        return web.json_response({"id": "acme/small", "sha": COMMIT, "siblings": siblings})

    async def list(self, _: web.Request) -> web.Response:
        files = [
            {"type": "file", "path": name, "size": len(body), "oid": "0" * 40} for name, body in self.files.items()
        ]
        return web.json_response(files)

    async def send(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if request.method == "GET":
            self.asked.append(name)
        body = self.files[name]
        return web.Response(
            body=body, headers={"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        )


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
    hub = Hub()
    async with TestServer(hub.app()) as server:
        url = str(server.make_url("")).rstrip("/")
        without, line = await resolve(tmp_path, url, "folder", "weight_folder")
        assert without.startswith("small ")
        assert "tokenizer.json" in without
        assert "model.safetensors" not in without  # the gateway needs none
        assert "model.safetensors" in line
        assert (hub.asked[-1], len(set(hub.asked))) == ("model.safetensors", len(hub.asked))
    assert await resolve(tmp_path, url, "folder", "weight_folder") == [line, line]  # without the hub


async def test_a_name_that_the_hub_lacks_is_refused(tmp_path):
    async with TestServer(web.Application()) as server:
        [line] = await resolve(tmp_path, str(server.make_url("")).rstrip("/"), "folder")
    assert line.startswith("ConfigError model.path: there is no folder acme/small, and no such model on the hub or")
