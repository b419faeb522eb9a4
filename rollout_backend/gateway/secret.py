"""The run's secret: the settings' own, or one kept in the run's folder for whoever goes on with the run.

What must always hold: a trainer that is started again under the same run id, with the same folder or the same
`gateway.secret`, checks the seals and knows the session keys of its earlier lives; the keys of another run
open nothing here. The secret never leaves the training side's machines.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError
from rollout_backend.gateway.tokens import MIN_SECRET_CHARS

SECRET_FILE = "gateway-secret"  # noqa: S105  # a file's name


def run_secret(config: RolloutConfig) -> str:
    """The secret; where there is none yet, it is made and kept.

    Raises:
        ConfigError: the file cannot be read or written, others may read it, or it holds no secret.
    """
    if config.gateway.secret is not None:
        return config.gateway.secret.get_secret_value()
    path = config.run_dir / SECRET_FILE
    mend = f"mend or delete {path}, or set gateway.secret"
    try:
        if not path.exists():
            _create(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor) as file:
            found = os.fstat(descriptor)
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(f"the run's secret cannot be kept in {path}: {error.strerror}; {mend}") from None
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.getuid():
        raise ConfigError(f"others may read the run's secret in {path}: chmod 600 it, or {mend}")
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(f"{path} holds no secret of at least {MIN_SECRET_CHARS} characters; {mend}")
    return secret


def key_secret(secret: str, run_id: str) -> str:
    """Signs the run's session keys. It follows from the run's secret, which it does not tell, and from its name:
    one secret of the settings may serve many runs."""
    return hmac.digest(secret.encode(), b"the session keys of " + run_id.encode(), "sha256").hex()


def _create(path: Path) -> None:
    """Whole or not at all, and the first of several wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(48))
        os.link(part, path)
    except FileExistsError:
        pass  # another process of this run was first
    finally:
        part.unlink()
