"""What can go wrong on the training side, and where each is dealt with.

    RolloutBackendError
    ├── ConfigError            the settings: raised before anything is started or spent
    ├── TaskFileError          a task file with a broken line, which is named
    ├── PreflightError         credentials, bucket, queue, runtime: found out before the first rollout
    ├── ServingError           an engine or the router
    │   ├── StartupError           never became healthy, died on the way, or its port is taken
    │   └── EngineUnavailable      no engine left that could answer
    ├── RuntimeCallError       one call to the agent runtime; the dispatcher acts on its kind
    │   ├── Throttled              429: wait and go on, the limiter slows down
    │   ├── QuotaExceeded          402: too many sessions; wait until some have closed
    │   ├── RuntimeConflict        409: try again
    │   ├── RuntimeUnavailable     5xx, or no connection: try again
    │   ├── Unsigned               there are no credentials, or none to be had just now: it was not sent
    │   ├── OutcomeUnknown         the call was cut or timed out after it was sent: the session may be running
    │   └── Rejected               4xx for good: the rollout ends as infra_error at once
    ├── StoreError             S3 did not answer as it should; a later look may find the result
    │   └── ResultMissing          nothing is stored under the key
    ├── CredentialsExpired     AWS says so: the run stops, and goes on where it was with new ones
    ├── CircuitOpen            rollouts are lost in one way again and again: the run stops, with a diagnosis
    ├── ManifestError          a step was begun before, and what it left cannot be understood
    └── LedgerError            a step that does not reconcile: a bug, the run stops with the ledger printed

A failed rollout is not an exception: it is a `Rollout`, or a ledger entry, with an outcome and a reason.
`agent_wrapper.contract.ContractError` is the one error of malformed objects on both sides.
"""

from __future__ import annotations


class RolloutBackendError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(RolloutBackendError):
    """Settings that cannot work. The message names the key and says what to change."""


class TaskFileError(RolloutBackendError):
    """A task file that cannot be read whole. The message names the line or the row."""


class PreflightError(RolloutBackendError):
    """Something outside this process that the run needs is missing or refuses us."""


class ServingError(RolloutBackendError):
    """An engine or the router."""


class StartupError(ServingError):
    """A server process that did not come up. The message carries the end of its log and the log's path."""


class EngineUnavailable(ServingError):
    """No engine could answer a model call."""


class RuntimeCallError(RolloutBackendError):
    """One call to the agent runtime that failed. `reason` is what the ledger counts by."""

    reason = "runtime_error"
    never_opened = False  # True: refused before a session could start, so there is none to stop


class Throttled(RuntimeCallError):
    reason = "throttled"
    never_opened = True


class QuotaExceeded(RuntimeCallError):
    reason = "quota_exceeded"
    never_opened = True


class RuntimeConflict(RuntimeCallError):
    reason = "runtime_conflict"
    never_opened = True


class RuntimeUnavailable(RuntimeCallError):
    reason = "runtime_unavailable"


class Unsigned(RuntimeCallError):
    reason = "no_credentials"
    never_opened = True


class OutcomeUnknown(RuntimeCallError):
    reason = "invoke_outcome_unknown"


class Rejected(RuntimeCallError):
    reason = "invoke_rejected"

    def __init__(self, message: str, reason: str = "invoke_rejected") -> None:
        super().__init__(message)
        self.reason = reason
        self.never_opened = reason in ("runtime_not_found", "access_denied", "credentials_expired")


class StoreError(RolloutBackendError):
    """S3 did not answer as it should."""


class ResultMissing(StoreError):
    """Nothing is stored under the key: an announcement that names it is ahead of its time, or false."""


class CredentialsExpired(RolloutBackendError):
    """AWS takes this process's credentials no more, and they do not renew themselves. The message says what to do."""


class CircuitOpen(RolloutBackendError):
    """The run is stopped, for its rollouts are lost in one way again and again. The message is the diagnosis."""


class ManifestError(RolloutBackendError):
    """The record of an earlier take of a step cannot be read. Nothing was dispatched."""


class LedgerError(RolloutBackendError):
    """The books do not balance. The message is the whole ledger."""
