"""Files that an agent publishes with its result, for a scorer on the training side.

    context.artifacts.add("patch.diff", patch)
    context.artifacts.add("log.txt", Path("/tmp/log.txt"))

Invariant: an artifact is copied when it is added, so later changes to the file have no effect.
"""

import threading
from pathlib import Path

from agent_wrapper.contract import MAX_ARTIFACT_BYTES, MAX_ARTIFACTS, Artifact, ContractError, pack_artifacts


class ArtifactError(ValueError):
    """An artifact that cannot be published. The message says why, and names the limit."""


class Artifacts:
    """The artifacts of one rollout. Thread-safe. A deployed agent publishes none."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._listed: list[Artifact] = []  # the same files, as the result lists them
        self._lock = threading.Lock()

    def add(self, name: str, content: bytes | str | Path) -> None:
        """Publish a file under this name when the agent returns. `content` is its bytes, its text, or its path.

        Raises:
            ArtifactError: the name is invalid or taken, or there are too many artifacts or bytes.
            OSError: the file cannot be read.
        """
        if isinstance(content, Path):
            size = content.stat().st_size
            if size > MAX_ARTIFACT_BYTES:
                raise ArtifactError(
                    f"{content} has {size} bytes, more than the {MAX_ARTIFACT_BYTES} of all artifacts"
                )
            content = content.read_bytes()
        data = content.encode() if isinstance(content, str) else bytes(content)
        if len(data) > MAX_ARTIFACT_BYTES:
            raise ArtifactError(
                f"{name!r} has {len(data)} bytes, more than the {MAX_ARTIFACT_BYTES} of all artifacts"
            )
        try:
            artifact = Artifact.of(name, data)
        except ContractError:
            raise ArtifactError(
                f"{name!r} cannot be an artifact's name: use up to 128 letters, digits, '.', '_' and '-', and begin "
                "with a letter, a digit or '_'"
            ) from None
        with self._lock:
            if name in self._files:
                raise ArtifactError(f"an artifact {name!r} was added before")
            if len(self._files) == MAX_ARTIFACTS:
                raise ArtifactError(f"a rollout has {MAX_ARTIFACTS} artifacts at most")
            total = sum(map(len, self._files.values())) + len(data)
            if total > MAX_ARTIFACT_BYTES:
                raise ArtifactError(f"with {name!r} the artifacts have {total} bytes, more than {MAX_ARTIFACT_BYTES}")
            self._files[name] = data
            self._listed.append(artifact)

    def __bool__(self) -> bool:
        return bool(self._files)

    def listed(self) -> tuple[Artifact, ...]:
        """Return the entries for the result."""
        with self._lock:
            return tuple(self._listed)

    def pack(self) -> bytes:
        """Return the object that holds all artifacts."""
        with self._lock:
            return pack_artifacts(self._files)
