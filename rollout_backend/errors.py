"""The exceptions of the training side.

    RolloutBackendError
    ├── ConfigError            the settings: raised before anything is started or spent
    ├── TaskFileError          a task file with a broken line, which is named
    ├── PreflightError         credentials, bucket, queue, runtime: found out before the first rollout
    ├── ServingError           an engine or the router
    │   ├── StartupError           never became healthy, died on the way, or its port is taken
    │   └── EngineUnavailable      no engine left that could answer
    ├── RuntimeCallError       one call to the agent runtime; the dispatcher acts on its kind
    │   ├── Throttled              429: repeated until the time is up, at a lower rate
    │   ├── QuotaExceeded          402: too many sessions; the same
    │   ├── RuntimeConflict        409: the same, at the same rate
    │   ├── RuntimeUnavailable     503, or no connection: as Throttled. Another 5xx: the session may have opened; it
    │   │                          is closed, and another attempt is made
    │   ├── NoCredentials          there are no credentials, or none to be had just now: it was not sent
    │   ├── OutcomeUnknown         the call was cut or timed out after it was sent: the session may be running
    │   ├── ContainerStartTimeout  424, the container was not up in time: another attempt, in another session
    │   └── InvokeRejected         4xx for good: the rollout ends as infra_error at once
    ├── RunHeld                another manager holds the run, or has taken it over: this one ends
    ├── CloudLost              the local cloud's S3, SQS or runtime has ended, and each session with it
    ├── WriteConflict          an object is not what it was when it was read; who wrote it decides what follows
    ├── StoreError             S3 did not answer as it should; a later look may find the result
    │   └── ResultMissing          nothing is stored under the key
    ├── CredentialsExpired     the run stops; restart it with new ones to resume
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
    never_opened = False  # True: no session was started, so there is none to stop
    refused = False  # True: turned away for now. It is no attempt: the same call is repeated until the time is up
    slow_down = False  # True: the runtime takes fewer calls than it gets


class Throttled(RuntimeCallError):
    reason = "throttled"
    never_opened = refused = slow_down = True


class QuotaExceeded(RuntimeCallError):
    reason = "quota_exceeded"
    never_opened = refused = slow_down = True


class RuntimeConflict(RuntimeCallError):
    reason = "runtime_conflict"
    never_opened = refused = True


class RuntimeUnavailable(RuntimeCallError):
    reason = "runtime_unavailable"
    slow_down = True

    def __init__(self, message: str, *, refused: bool = False, never_opened: bool = False) -> None:
        """`refused`: 503, which says that the call was not processed. `never_opened`: it was not even received."""
        super().__init__(message)
        self.refused = refused or never_opened
        self.never_opened = never_opened


class NoCredentials(RuntimeCallError):
    reason = "no_credentials"
    never_opened = True


class OutcomeUnknown(RuntimeCallError):
    reason = "invoke_outcome_unknown"


class ContainerStartTimeout(RuntimeCallError):
    reason = "container_start_timeout"


class InvokeRejected(RuntimeCallError):
    reason = "invoke_rejected"

    def __init__(self, message: str, reason: str = "invoke_rejected") -> None:
        super().__init__(message)
        self.reason = reason
        self.never_opened = reason in ("runtime_not_found", "access_denied", "credentials_expired", "run_taken_over")


class RunHeld(RolloutBackendError):
    """Another manager holds the run, or has taken it over. The message says which one, and what to do."""


class CloudLost(RolloutBackendError):
    """A process of the local cloud has ended by itself. The message carries the end of its log."""


class WriteConflict(RolloutBackendError):
    """A conditional write was refused: the object has changed, exists already, or is gone."""


class StoreError(RolloutBackendError):
    """S3 did not answer as it should."""


class ResultMissing(StoreError):
    """Nothing is stored under the key: an announcement that names it is ahead of its time, or false."""


class CredentialsExpired(RolloutBackendError):
    """AWS takes this process's credentials no more, and they do not renew themselves. The message says what to do."""


class CircuitOpen(RolloutBackendError):
    """The run is stopped, for its rollouts are lost in one way again and again. The message is the diagnosis."""


class ManifestError(RolloutBackendError):
    """The manifest of an earlier execution of a step cannot be read. Nothing was dispatched."""


class LedgerError(RolloutBackendError):
    """The books do not balance. The message is the whole ledger."""
