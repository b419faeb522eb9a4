"""The exceptions of the training side.

    RolloutBackendError
    ├── ConfigError            invalid settings: raised before anything is started
    ├── TaskFileError          an invalid task file; the message names the line
    ├── PreflightError         credentials, bucket, queue or runtime: raised before the first rollout
    ├── WeightsMismatch        new weights have other names or shapes than the model; none was sent to an engine
    ├── ServingError           an engine, the router, a gateway or the dialer
    │   ├── StartupError           the process did not become healthy, or its port is taken
    │   ├── WeightUpdateFailed     no engine loaded the new weights: all are restarted with the previous ones
    │   └── EngineUnavailable      no engine answered a model call
    ├── RuntimeCallError       one call to the agent runtime; the rollout acts on the subclass
    │   ├── Throttled              429: retried until the deadline, at a lower rate
    │   ├── QuotaExceeded          402: too many sessions; retried in the same way
    │   ├── RuntimeConflict        409: retried until the deadline, at the same rate
    │   ├── LeaseUnconfirmed       not sent, as another manager may have the run: retried until the deadline
    │   ├── RuntimeNotReady        the runtime of a task's image is being created: retried in the same way
    │   ├── RuntimeUnavailable     503, or no connection: retried like Throttled. After another 5xx the session may
    │   │                          be open: it is closed, and another attempt is made
    │   ├── NoCredentials          no credentials were found or could be renewed; retried like Throttled
    │   ├── WrongClock             this machine's clock is off, so AWS refuses the signature; retried like Throttled
    │   ├── OutcomeUnknown         no answer to an invoke that was sent, or to a stop: the session may run
    │   ├── ContainerStartTimeout  424: the container did not start, or not in time; another attempt gets another one
    │   └── InvokeRejected         a 4xx: permanent once it repeats, as the rollout's attempts do; it then ends as
    │                              infra_error
    ├── RunHeld                another manager holds the run, or has taken it over: this manager stops
    ├── CloudLost              the local cloud's S3, SQS or runtime has ended, and every session with it
    ├── WriteConflict          an object has changed since it was read
    ├── StoreError             S3 failed; a retry may succeed
    │   └── ResultMissing          nothing is stored under the key
    ├── TrainingServiceError   the training service failed or did not answer; a retry may succeed
    ├── CredentialsExpired     the run stops; restart it with new credentials to resume
    ├── CircuitOpen            too many consecutive failures for one reason: the run stops with a diagnosis
    ├── ManifestError          the manifest of an earlier execution of a step cannot be read
    └── LedgerError            a step does not reconcile, which is a bug: the run stops and prints the ledger

A failed rollout is not an exception: it is a `Rollout`, or a ledger entry, with an outcome and a reason.
`agent_wrapper.contract.ContractError` is the one error of malformed objects on both sides.
"""


class RolloutBackendError(Exception):
    """Base class of the exceptions that this package raises."""


class ConfigError(RolloutBackendError):
    """Invalid settings. The message names the setting and says what to change."""


class TaskFileError(RolloutBackendError):
    """An invalid task file. The message names the line or the row."""


class PreflightError(RolloutBackendError):
    """An external service that the run needs is missing or refuses access."""

    def __init__(self, message: str, cause: str = "") -> None:
        """`cause` names a cause that fails other checks as well, such as a missing login."""
        super().__init__(message)
        self.cause = cause


class ServingError(RolloutBackendError):
    """An engine, the router, a gateway or the dialer has failed."""


class WeightsMismatch(RolloutBackendError):
    """New weights do not fit the served model. The message names tensors."""


class WeightUpdateFailed(ServingError):
    """No engine loaded the new weights. The message has the reason of each; all restart with the previous weights."""


class StartupError(ServingError):
    """A server process did not start. The message has the end of its log and the log's path."""


class EngineUnavailable(ServingError):
    """No engine answered a model call."""


class RuntimeCallError(RolloutBackendError):
    """A call to the agent runtime failed. `reason` is the reason in the ledger."""

    reason = "runtime_error"
    never_opened = False
    """True if no session was opened, so that none needs a stop."""
    refused = False
    """True if the call is refused for now. It does not count as an attempt, and is retried until the deadline."""
    slow_down = False
    """True if the runtime accepts fewer calls than it receives."""
    retry_after_s = 0.0
    """The runtime's Retry-After: calls of this operation wait that long."""


class Throttled(RuntimeCallError):
    reason = "throttled"
    never_opened = refused = slow_down = True


class QuotaExceeded(RuntimeCallError):
    reason = "quota_exceeded"
    never_opened = refused = slow_down = True


class RuntimeConflict(RuntimeCallError):
    reason = "runtime_conflict"
    never_opened = refused = True


class LeaseUnconfirmed(RuntimeCallError):
    never_opened = refused = True


class RuntimeNotReady(RuntimeConflict):
    reason = "runtime_not_ready"


class RuntimeUnavailable(RuntimeCallError):
    reason = "runtime_unavailable"
    slow_down = True

    def __init__(self, message: str, *, refused: bool = False, never_opened: bool = False) -> None:
        """`refused`: the runtime answered 503 and did not process the call. `never_opened`: it did not receive it."""
        super().__init__(message)
        self.refused = refused or never_opened
        self.never_opened = never_opened


class NoCredentials(RuntimeCallError):
    reason = "no_credentials"
    never_opened = refused = slow_down = True


class WrongClock(RuntimeCallError):
    reason = "wrong_clock"
    never_opened = refused = slow_down = True


class OutcomeUnknown(RuntimeCallError):
    reason = "invoke_outcome_unknown"


class ContainerStartTimeout(RuntimeCallError):
    def __init__(self, message: str, reason: str = "container_start_timeout") -> None:
        super().__init__(message)
        self.reason = reason


_NEVER_OPENED = frozenset({"runtime_not_found", "runtime_create_failed", "access_denied", "credentials_expired"})


class InvokeRejected(RuntimeCallError):
    reason = "invoke_rejected"

    def __init__(self, message: str, reason: str = "invoke_rejected") -> None:
        super().__init__(message)
        self.reason = reason
        self.never_opened = reason in _NEVER_OPENED
        # No later invoke of this run can succeed.
        self.final = reason == "credentials_expired"


class RunHeld(RolloutBackendError):
    """Another manager holds the run, or has taken it over. The message names it and says what to do."""


class CloudLost(RolloutBackendError):
    """A process of the local cloud has ended unexpectedly. The message has the end of its log."""


class WriteConflict(RolloutBackendError):
    """S3 refused a conditional write: the object has changed, already exists, or was deleted."""


class StoreError(RolloutBackendError):
    """S3 failed or did not answer in time."""


class ResultMissing(StoreError):
    """Nothing is stored under the key: the announcement that names it is early or false."""


class TrainingServiceError(RolloutBackendError):
    """The training service failed or did not answer in time."""


class CredentialsExpired(RolloutBackendError):
    """AWS no longer accepts this process's credentials, and they cannot be renewed. The message says what to do."""


class CircuitOpen(RolloutBackendError):
    """The run stops after too many consecutive failures for one reason. The message is the diagnosis."""


class ManifestError(RolloutBackendError):
    """The manifest of an earlier execution of a step cannot be read, or this one's is too large. Nothing was
    dispatched."""


class LedgerError(RolloutBackendError):
    """A step's ledger does not reconcile. The message prints the ledger."""
