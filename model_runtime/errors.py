"""Every error Repertory raises on purpose.

RepertoryError
├── ConfigError (ValueError)              a setting is wrong; names the field and what is allowed
├── StoreError (OSError)
│   ├── ObjectNotFoundError (FileNotFoundError)
│   ├── ObjectExistsError (FileExistsError)   create-if-absent lost to other bytes
│   ├── StoreAccessError (PermissionError)
│   ├── StoreUnavailableError (ConnectionError)
│   │   ├── StoreFullError                no space left where the store is
│   │   └── StoreOutageError              unavailable for longer than store.max_outage_s; the run stops
│   └── StoreUnsafeError                  the store ignores conditional writes
├── CorruptObjectError (ValueError)       bytes in the store do not match their checksum or schema
├── LogRemovedError                       a resume needs shards that retention has removed
├── InvalidTrajectoryError (ValueError)   a record breaks an invariant of `types.Trajectory`
├── SupersededError                       a newer epoch leads this run; this process must stop
├── PrefectError (ConnectionError)        Prefect did not answer, or refused what it was asked
├── RunFailedError (RuntimeError)         a run ended, but a model or its work failed; names each reason
├── ProcessError (RuntimeError)           a child process failed; carries the end of its log
│   ├── RolloutServerError
│   └── TrainerError
├── PublishError (RuntimeError)
│   ├── AdapterLoadError                  a replica did not load the version, or does not list it
│   └── CanaryMismatchError               a replica serves other weights than the trainer's
└── GatewayError                          mapped to HTTP once, in gateway/app.py
    ├── InvalidRequestError (ValueError)      400
    ├── AuthenticationError (PermissionError) 401
    ├── UnknownAgentError (LookupError)       404
    ├── UnknownModelError (LookupError)       404
    ├── UnknownSessionError (LookupError)     404
    ├── ConflictError                         409
    │   └── AlreadyDoneError                  409: and never will be: nothing is left to do
    ├── RunEndedError                         410
    ├── RequestTooLargeError                  413: the body is longer than the gateway takes
    ├── HeadersTooLargeError                  431: the headers are
    ├── LimitExceededError                    429: a bound that waiting does not lift
    ├── TooManyRequestsError                  429 with Retry-After: a bound that is free again soon
    ├── BackendRejectedError                  the backend's own 4xx, passed through
    ├── BackendUnavailableError (ConnectionError)  502: the replica broke off or answered 5xx
    └── ModelNotReadyError (TimeoutError)     503 with Retry-After
"""

from __future__ import annotations


class RepertoryError(Exception):
    """The root: catch it to catch everything Repertory raises on purpose."""


class ConfigError(RepertoryError, ValueError):
    """A setting is wrong. The message names the path of the field, its value and what is allowed."""


class StoreError(RepertoryError, OSError):
    """An object store operation failed. The message names the operation and the URL."""


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """There is no object at this URL."""


class ObjectExistsError(StoreError, FileExistsError):
    """Create-if-absent found an object with other bytes at this URL."""


class StoreAccessError(StoreError, PermissionError):
    """The store refused these credentials, or this account may not do that here."""


class StoreUnavailableError(StoreError, ConnectionError):
    """The store did not answer within its limits."""


class StoreFullError(StoreUnavailableError):
    """There is no space left for this object. Waited for like an outage: the run goes on once there is."""


class StoreOutageError(StoreUnavailableError):
    """The store was unavailable for longer than `store.max_outage_s`."""


class StoreUnsafeError(StoreError):
    """The store ignores conditional writes, so two writers could overwrite each other unseen."""


class CorruptObjectError(RepertoryError, ValueError):
    """An object's bytes do not match its checksum or its schema."""


class LogRemovedError(RepertoryError):
    """Somebody needs a part of a model's log that retention has removed. Names it and the settings."""


class InvalidTrajectoryError(RepertoryError, ValueError):
    """A trajectory breaks an invariant; it is refused and its neighbours are not."""


class SupersededError(RepertoryError):
    """A newer epoch leads this run. Whoever sees this stops without writing anything more."""


class PrefectError(RepertoryError, ConnectionError):
    """The Prefect server did not answer within its limits, or refused what it was asked."""


class RunFailedError(RepertoryError, RuntimeError):
    """A run came to its end, but a model or the agents' work failed. Names each and why."""


class ProcessError(RepertoryError, RuntimeError):
    """A child process failed. The message ends with the last lines of its log."""


class RolloutServerError(ProcessError):
    """A vLLM server did not start, died, or stopped answering."""


class TrainerError(ProcessError):
    """A trainer process died or reported a failure."""


class PublishError(RepertoryError, RuntimeError):
    """A version could not be put into service. The version before it keeps serving."""


class AdapterLoadError(PublishError):
    """A replica refused the adapter, or does not list it after loading."""


class CanaryMismatchError(PublishError):
    """A replica's logprobs on the canary are not the trainer's for this version."""


class GatewayError(RepertoryError):
    """An error the gateway answers a caller with, in the caller's own API shape."""

    status_code = 500
    code = "internal_error"
    retry_after_s: float | None = None


class InvalidRequestError(GatewayError, ValueError):
    """The request can't be honoured as written. `param` names the offending field."""

    status_code = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class AuthenticationError(GatewayError, PermissionError):
    """The API key is missing or belongs to another session."""

    status_code = 401
    code = "invalid_api_key"


class UnknownAgentError(GatewayError, LookupError):
    """No route for this agent. There is no default model."""

    status_code = 404
    code = "unknown_agent"


class UnknownModelError(GatewayError, LookupError):
    """No binding for this model."""

    status_code = 404
    code = "unknown_model"


class UnknownSessionError(GatewayError, LookupError):
    """No open session of this id."""

    status_code = 404
    code = "unknown_session"


class ConflictError(GatewayError):
    """The session or group is not in a state that allows this."""

    status_code = 409
    code = "conflict"


class AlreadyDoneError(ConflictError):
    """The group or its member is settled, or will be without anybody's work: it ends, or awaits its rewards
    alone."""

    code = "already_done"


class RunEndedError(GatewayError):
    """The run takes no new work: it is draining, stopping, or every model is past its steps."""

    status_code = 410
    code = "run_ended"


class RequestTooLargeError(GatewayError):
    """The body is longer than `gateway.max_request_bytes`, or holds too many values."""

    status_code = 413
    code = "request_too_large"


class HeadersTooLargeError(GatewayError):
    """Request line and headers are longer than `gateway.max_header_bytes`."""

    status_code = 431
    code = "headers_too_large"


class LimitExceededError(GatewayError):
    """A bound is reached, and waiting does not lift it."""

    status_code = 429
    code = "limit_exceeded"


class TooManyRequestsError(GatewayError):
    """A bound of the config is reached by what is under way; asking again later may succeed."""

    status_code = 429
    code = "too_many_requests"
    retry_after_s = 1.0


class BackendRejectedError(GatewayError):
    """The model's server refused the request (4xx). Permanent: never retried."""

    code = "backend_rejected"

    def __init__(self, message: str, *, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class BackendUnavailableError(GatewayError, ConnectionError):
    """The replica could not be reached, broke off, or answered 5xx. Another attempt may succeed."""

    status_code = 502
    code = "backend_unavailable"


class ModelNotReadyError(GatewayError, TimeoutError):
    """The model had no ready replica before the request's deadline."""

    status_code = 503
    code = "model_not_ready"
    retry_after_s = 2.0
