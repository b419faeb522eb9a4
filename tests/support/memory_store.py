"""A bucket in memory, with what the training side asks of a result store."""

import hashlib
from collections.abc import AsyncIterator

from rollout_backend.config import StorageConfig
from rollout_backend.errors import ResultMissing, StoreError, WriteConflict
from rollout_backend.run.collect.store import StoredObject


class MemoryStore:
    """The next `failures` calls fail."""

    def __init__(self, prefix: str) -> None:
        self.config = StorageConfig(bucket="bucket", prefix=prefix)
        self.objects: dict[str, bytes] = {}
        self.failures = 0

    def _call(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError("503 SlowDown")

    async def get(self, key: str) -> bytes:
        self._call()
        if key not in self.objects:
            raise ResultMissing(f"nothing is stored under {key!r}")
        return self.objects[key]

    async def fetch(self, key: str) -> StoredObject:
        body = await self.get(key)
        return StoredObject(body, _etag(body), 0.0)

    async def put(self, key: str, body: bytes) -> None:
        self._call()
        self.objects[key] = body

    async def put_if_match(self, key: str, body: bytes, etag: str | None) -> str:
        self._call()
        if key in self.objects and self.objects[key] != body and _etag(self.objects[key]) != etag:
            raise WriteConflict(key)
        self.objects[key] = body
        return _etag(body)

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        self._call()
        for key in list(self.objects):
            if key.startswith(prefix):
                yield key


def _etag(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
