"""Create the run's secret, and the session keys derived from it.

The secret is `gateway.secret`, or a generated one that is stored next to the run directories for later restarts.

Invariants:

- A trainer restarted under the same run id, with the same `output_dir` or `gateway.secret`, accepts the seals and
  session keys that it issued before. It does not accept another run's keys.
- The secret never leaves the training side's machines, and is not in the run directory, which may be shared.
"""

import hmac
import os
import secrets
import stat
from pathlib import Path

from pydantic import SecretStr

from agent_wrapper.contract import ModelEndpoint
from rollout_backend.base.atomic_file import write_file
from rollout_backend.config import RolloutConfig
from rollout_backend.core.session_key import MIN_SECRET_CHARS, SessionClaims, issue
from rollout_backend.errors import ConfigError


def secret_file(config: RolloutConfig) -> Path:
    """Return the path of the generated secret: OUTPUT_DIR/.secrets/RUN_ID."""
    return config.output_dir / ".secrets" / config.run_id


def run_secret(config: RolloutConfig) -> str:
    """Return the secret. Generate and store it if it does not exist.

    Raises:
        ConfigError: the file cannot be read or written, is readable by others, or contains no secret.
    """
    if config.gateway.secret is not None:
        return config.gateway.secret.get_secret_value()
    path = secret_file(config)
    remedy = f"repair or delete {path}, or set gateway.secret"
    try:
        if not path.exists():
            write_file(path, secrets.token_urlsafe(48).encode(), private=True, keep=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor) as file:
            found = os.fstat(descriptor)
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(f"the run's secret cannot be kept in {path}: {error.strerror}; {remedy}") from None
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.getuid():
        raise ConfigError(f"others may read the run's secret in {path}: chmod 600 it, or {remedy}")
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(f"{path} holds no secret of at least {MIN_SECRET_CHARS} characters; {remedy}")
    return secret


def revealed(secret: SecretStr | None) -> str | None:
    """Return the value of a secret setting, which may be unset."""
    return secret.get_secret_value() if secret is not None else None


def key_secret(secret: str, run_id: str) -> str:
    """Return the secret that signs the run's session keys.

    The secret is derived from the run's secret and the run id, because several runs may share `gateway.secret`.
    """
    return hmac.digest(secret.encode(), b"the session keys of " + run_id.encode(), "sha256").hex()


def model_endpoint(
    public_url: str, model: str, secret: str, claims: SessionClaims, *, key_in_path: bool = False
) -> ModelEndpoint:
    """Return the model endpoint of one session, with a new key for these claims.

    Args:
        public_url: The gateway's address for agents, without a trailing slash.
        model: The name under which the model is served.
        secret: The run's secret.
        claims: The rights and the expiry of the key.
        key_in_path: Whether the base URL also contains the key.
    """
    base, key = f"{public_url}/v1", issue(secret, claims)
    return ModelEndpoint(
        base_url=f"{public_url}/k/{key}/v1" if key_in_path else base,
        api_key=key,
        name=model,
        trajectory_url=f"{base}/rollout/trajectory",
        heartbeat_url=f"{base}/rollout/heartbeat",
    )
