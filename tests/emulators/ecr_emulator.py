"""ECR and ECR Public, with the manifests and configs of images that nobody can pull."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

from aiohttp import web

from rollout_backend.workbench.local.http_proxy import HttpProxy

REGISTRY = "000000000000.dkr.ecr.us-east-1.amazonaws.com"
_DOCKER = "application/vnd.docker."
_TYPES = {  # of a single manifest, of a list, and of a config
    "docker": (
        f"{_DOCKER}distribution.manifest.v2+json",
        f"{_DOCKER}distribution.manifest.list.v2+json",
        f"{_DOCKER}container.image.v1+json",
    ),
    "oci": tuple(f"application/vnd.oci.image.{name}.v1+json" for name in ("manifest", "index", "config")),
}


class EcrEmulator(HttpProxy):
    """An async context manager. Forwards what is not ECR's to `upstream`."""

    def __init__(self, upstream: str = "") -> None:
        super().__init__()
        self.upstream = upstream
        self.calls: Counter[str] = Counter()
        self.refused: set[str] = set()
        """Operations that these credentials may not call."""
        self._manifests: dict[str, dict[str, str]] = {}  # by repository, and by tag or digest
        self._blobs: dict[str, bytes] = {}

    def push(self, image: str, *architectures: str, kind: str = "oci", config: bytes | None = None) -> str:
        """Add an image, and return its digest. Of several architectures, it is a list, as buildx pushes it."""
        single, several, _ = _TYPES[kind]
        manifests = [self._single(each, kind, config) for each in architectures]
        if len(manifests) > 1:
            found: dict[str, Any] = {"schemaVersion": 2, "mediaType": several, "manifests": []}
            for text, architecture in zip(manifests, architectures, strict=True):
                os = "unknown" if architecture == "unknown" else "linux"  # attestations have no platform
                named = {"platform": {"architecture": architecture, "os": os}} if architecture else {}
                entry = {"mediaType": single, "digest": _digest(text.encode()), "size": len(text), **named}
                found["manifests"].append(entry)
            text = json.dumps(found)
        else:
            [text] = manifests
        repository, _, tag = image.partition("/")[2].partition(":")
        digest = _digest(text.encode())
        self._manifests.setdefault(repository, {}).update({tag: text, digest: text})
        return digest

    def manifest(self, image: str) -> str:
        repository, _, tag = image.partition("/")[2].partition(":")
        return self._manifests[repository][tag]

    def _single(self, architecture: str, kind: str, config: bytes | None) -> str:
        blob = config if config is not None else json.dumps({"architecture": architecture, "os": "linux"}).encode()
        self._blobs[_digest(blob)] = blob
        media_type, _, of_config = _TYPES[kind]
        described = {"mediaType": of_config, "digest": _digest(blob), "size": len(blob)}
        return json.dumps({"schemaVersion": 2, "mediaType": media_type, "config": described, "layers": []})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body, target = await request.read(), request.headers.get("X-Amz-Target", "")
        if "ContainerRegistry" in target:
            return self._private(target.rpartition(".")[2], json.loads(body))
        match request.path.strip("/").split("/"):
            case ["token"]:
                return web.json_response({"token": "anonymous"})
            case ["layers", digest]:
                self.calls["layer"] += 1
                return web.Response(body=self._blobs[digest])
            case ["v2", *parts]:
                return self._public(request, "/".join(parts[:-2]), *parts[-2:])
        return await self._forward(self.upstream, request, body)

    def _private(self, operation: str, asked: dict[str, Any]) -> web.Response:
        self.calls[operation] += 1
        if operation in self.refused:
            return _error("AccessDeniedException", f"not authorized to perform: ecr:{operation}")
        assert asked["registryId"] == REGISTRY.partition(".")[0]
        if operation == "GetDownloadUrlForLayer":
            return web.json_response({"downloadUrl": f"{self.url}/layers/{asked['layerDigest']}"})
        if (manifests := self._manifests.get(asked["repositoryName"])) is None:
            return _error("RepositoryNotFoundException", "The repository does not exist")
        assert len(asked["imageIds"]) <= 100
        images, failures = [], []
        for each in asked["imageIds"]:
            text = manifests.get(each.get("imageTag") or each["imageDigest"])
            if text is None:
                failures.append({"imageId": each, "failureCode": "ImageNotFound", "failureReason": "not found"})
            else:
                media_type = json.loads(text)["mediaType"]
                assert media_type in asked["acceptedMediaTypes"]
                images.append({"imageId": {"imageDigest": _digest(text.encode()), **each}, "imageManifest": text})
        return web.json_response({"images": images, "failures": failures})

    def _public(self, request: web.Request, repository: str, kind: str, reference: str) -> web.Response:
        if request.headers.get("Authorization") != "Bearer anonymous":
            return web.Response(status=401)
        if kind == "blobs":
            raise web.HTTPTemporaryRedirect(f"{self.url}/layers/{reference}")
        text = self._manifests.get(repository, {}).get(reference)
        return web.Response(status=404) if text is None else web.Response(text=text)


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _error(code: str, message: str) -> web.Response:
    return web.json_response({"__type": code, "message": message}, status=400)
