"""The manifests of a run's steps, in S3."""

from __future__ import annotations

from pydantic_core import from_json

from agent_wrapper.contract import ContractError
from rollout_backend.collect.store import ResultStore
from rollout_backend.errors import ManifestError, ResultMissing
from rollout_backend.manifest import Manifest, manifest_key


class ManifestStore:
    def __init__(self, store: ResultStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    async def read(self, step: int) -> Manifest | None:
        """What was written of the step last; None if it was never begun.

        Raises:
            ManifestError: it is there and cannot be understood.
            StoreError: S3 did not answer.
        """
        key = self._key(step)
        try:
            manifest = Manifest.parse(from_json(await self._store.get(key)))
        except ResultMissing:
            return None
        except ValueError as error:  # a ContractError is one
            field = error if isinstance(error, ContractError) else f"not JSON: {error}"
            raise ManifestError(
                f"s3://{self._store.config.bucket}/{key} is not a manifest of this version ({field}): finish the run "
                "with the version that began it, or give this one another run_id"
            ) from None
        if (manifest.run_id, manifest.step) != (self._run_id, step):
            raise ManifestError(f"{key} is the manifest of step {manifest.step} of run {manifest.run_id!r}")
        return manifest

    async def write(self, manifest: Manifest) -> None:
        """Raises StoreError."""
        await self._store.put(self._key(manifest.step), manifest.model_dump_json(indent=1).encode())

    def _key(self, step: int) -> str:
        return manifest_key(self._store.config.prefix, self._run_id, step)
