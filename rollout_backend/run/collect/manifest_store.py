"""Store the manifests of a run's steps in S3.

Invariant: each write is conditional on the version that this manager last read or wrote, and carries the fencing
token of its lease on the run (see `run_lease`). Neither a delayed write nor a manager that has lost the run can
therefore replace a newer state.
"""

import asyncio

from pydantic_core import from_json

from agent_wrapper.contract import ContractError, lineage_key, manifest_key
from agent_wrapper.contract.codec import MAX_OBJECT_BYTES
from rollout_backend.core.lineage import Lineage, TrainerStart
from rollout_backend.core.manifest import Manifest
from rollout_backend.errors import ManifestError, ResultMissing, RunHeld, StoreError, WriteConflict
from rollout_backend.run.collect.store import ObjectStore

_AT_ONCE = 16


async def largest_fencing_token(store: ObjectStore, run_id: str, *, every: bool) -> int:
    """Return the largest fencing token in every manifest of a run, or in those of its last steps; 0 without any.

    Raises StoreError.
    """

    async def read(key: str) -> int:
        try:
            return int(from_json(await store.get(key))["fencing_token"])
        except (ContractError, ResultMissing, ValueError, LookupError, TypeError):
            # `ManifestStore.read` reports this error.
            return 0

    folder = _folder(store, run_id)
    steps = sorted(await _steps(store, folder), reverse=True)[: None if every else _AT_ONCE]
    keys, tokens = [manifest_key(store.config.prefix, run_id, step) for step in steps], [0]
    for start in range(0, len(keys), _AT_ONCE):
        tokens += await asyncio.gather(*map(read, keys[start : start + _AT_ONCE]))
    return max(tokens)


async def _steps(store: ObjectStore, folder: str) -> list[int]:
    names = [key.removeprefix(folder).removesuffix(".json") async for key in store.keys(folder)]
    return [int(name) for name in names if name.isdecimal()]


def _folder(store: ObjectStore, run_id: str) -> str:
    return manifest_key(store.config.prefix, run_id, 0).rpartition("/")[0] + "/"


class ManifestStore:
    """The manifests of one run, and the record of its trainers."""

    def __init__(self, store: ObjectStore, run_id: str, fencing_token: int = 0, owner: str = "") -> None:
        """`fencing_token` and `owner` identify this manager's lease on the run."""
        self._store = store
        self._run_id = run_id
        self._fencing_token = fencing_token
        self._owner = owner
        # ETags by step; None if the manifest did not exist.
        self._etags: dict[int, str | None] = {}
        self._lineage: Lineage | None = None

    async def begin(self, step: int, weights: str) -> Lineage:
        """Record that this trainer begins at a step with these weights, unless it has begun before. Return the
        trainers of the run up to this one.

        Raises:
            ManifestError: the record is malformed.
            RunHeld: another manager has taken over the run and begun.
            StoreError: S3 did not answer.
        """
        while self._lineage is None:
            key, lineage, etag = (
                lineage_key(self._store.config.prefix, self._run_id),
                Lineage(run_id=self._run_id),
                None,
            )
            try:
                stored = await self._store.fetch(key)
                lineage, etag = Lineage.parse(from_json(stored.body)), stored.etag
            except ResultMissing:
                pass
            except ValueError as error:
                raise self._malformed(key, error) from None
            if lineage.newest > self._fencing_token:
                raise RunHeld(
                    f"run {self._run_id!r} was taken over by another manager, which has begun: this one stops. Run "
                    "only one of them, or set another run_id for one"
                )
            if lineage.newest < self._fencing_token:
                start = TrainerStart(fencing_token=self._fencing_token, step=step, weights=weights)
                lineage = lineage.with_start(start)
                try:
                    await self._store.put_if_match(key, lineage.model_dump_json(indent=1).encode(), etag)
                except WriteConflict:
                    # Another manager wrote it, or an earlier write of this one arrived late.
                    continue
            self._lineage = lineage
        return self._lineage

    async def read(self, step: int) -> Manifest | None:
        """Return the step's manifest; None if the step never began.

        Raises:
            ManifestError: the manifest is malformed or has another version.
            RunHeld: another manager has taken over the run and written it.
            StoreError: S3 did not answer.
        """
        key = self._key(step)
        try:
            stored = await self._store.fetch(key)
            manifest = Manifest.parse(from_json(stored.body))
        except ResultMissing:
            self._etags[step] = None
            return None
        except ValueError as error:
            raise self._malformed(key, error) from None
        if (manifest.run_id, manifest.step) != (self._run_id, step):
            raise ManifestError(f"{key} is the manifest of step {manifest.step} of run {manifest.run_id!r}")
        if manifest.fencing_token > self._fencing_token:
            raise RunHeld(
                f"run {self._run_id!r} was taken over by another manager ({manifest.owner or 'unknown'}), which has "
                f"written {key}: this one stops. Run only one of them, or set another run_id for one"
            )
        self._etags[step] = stored.etag
        return manifest

    async def read_from(self, first: int) -> list[Manifest]:
        """Return the manifests of this step and all later steps, in order. Raises as `read` does."""
        numbers = sorted(await _steps(self._store, _folder(self._store, self._run_id)))
        found = [await self.read(number) for number in numbers if number >= first]
        return [manifest for manifest in found if manifest is not None]

    async def write(self, manifest: Manifest) -> None:
        """Replace the manifest that was last read or written.

        Raises:
            ManifestError: the manifest is too large to be read again.
            WriteConflict: a former owner of the run has written it since; read the manifest and plan again.
            RunHeld: another manager has taken over the run and written.
            StoreError: S3 did not store it.
        """
        fenced = manifest.model_copy(update={"fencing_token": self._fencing_token, "owner": self._owner})
        key, body = self._key(manifest.step), fenced.model_dump_json(indent=1).encode()
        if len(body) > MAX_OBJECT_BYTES:
            rollouts = sum(len(task.rollouts) for task in manifest.tasks)
            raise ManifestError(
                f"{key}, with {rollouts:,} rollouts, has {len(body):,} bytes, more than the {MAX_OBJECT_BYTES:,} "
                "that a restarted trainer reads: give the step fewer tasks"
            )
        try:
            self._etags[manifest.step] = await self._store.put_if_match(key, body, self._etags.get(manifest.step))
        except WriteConflict as conflict:
            found = await self.read(manifest.step)
            if found is not None and found.fencing_token < self._fencing_token:
                raise
            raise StoreError(f"{conflict}: an earlier write by this manager arrived late") from conflict

    def _malformed(self, key: str, error: ValueError) -> ManifestError:
        field = error if isinstance(error, ContractError) else f"not JSON: {error}"
        return ManifestError(
            f"s3://{self._store.config.bucket}/{key} is not a manifest of this version ({field}): finish the run "
            "with the version that began it, or set another run_id"
        )

    def _key(self, step: int) -> str:
        return manifest_key(self._store.config.prefix, self._run_id, step)
