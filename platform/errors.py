"""The errors of Gearshift, as one table: class, HTTP status, OpenAI `type` and `code`, and whether a client should retry.

Every error a client may see is a class here. Whatever else is raised inside becomes `InternalError`, whose text says
nothing about the inside. Errors are plain values: they survive pickling (Ray actors) and the engine wire.
"""

from __future__ import annotations

from typing import Any, ClassVar


class GearshiftError(Exception):
    """Root of the tree. `message` may be shown to a client; `param` names the request field that was wrong."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.param, self.retry_after_s)

    def body(self) -> dict[str, dict[str, str | None]]:
        """The OpenAI error body: all four keys are always present."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(GearshiftError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ContentBlocked(InvalidRequest):
    """An input guardrail refused the request."""

    code = "content_filter"


class ReviewRequired(GearshiftError):
    """A human has to look at it first; the message names the ticket."""

    status, type, code = 403, "invalid_request_error", "review_required"


class GuardrailAway(GearshiftError):
    """A guardrail that must not be skipped could not run, for a while."""

    status, type, code, retryable = 503, "overloaded_error", "guardrail_unavailable", True


class InvalidApiKey(GearshiftError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class PermissionDenied(GearshiftError):
    status, type, code = 403, "permission_error", "model_not_allowed"


class NotFound(GearshiftError):
    status, type, code = 404, "invalid_request_error", "unknown_url"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(GearshiftError):
    status, type, code = 405, "invalid_request_error", "method_not_supported"


class Conflict(GearshiftError):
    """Somebody else changed the state first; read it again."""

    status, type, code = 409, "invalid_request_error", "conflict"


class RequestTooLarge(GearshiftError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class RateLimited(GearshiftError):
    """A tenant's requests or tokens a minute are used up."""

    status, type, code, retryable = 429, "rate_limit_error", "rate_limit_exceeded", True


class Overloaded(GearshiftError):
    """A bounded queue is full. The work was not begun."""

    status, type, code, retryable = 429, "overloaded_error", "overloaded", True


class InternalError(GearshiftError):
    pass


class UpstreamError(GearshiftError):
    """A model server behind us failed or could not be reached."""

    status, code, retryable = 502, "upstream_error", True


class EngineUnavailable(GearshiftError):
    """No replica could finish the work: none is up, or the one that had it died."""

    status, code, retryable = 503, "engine_unavailable", True


class LimitsUnavailable(GearshiftError):
    """The store of counts is away and the configuration says to deny rather than to guess."""

    status, code, retryable = 503, "limits_unavailable", True


class StoreUnavailable(GearshiftError):
    """Redis is away, and without it there is no answer to give."""

    status, code, retryable = 503, "store_unavailable", True


class ShuttingDown(GearshiftError):
    status, code, retryable = 503, "shutting_down", True


class DeadlineExceeded(GearshiftError):
    """504 and not 408: clients retry a 408, and would repeat the slow work."""

    status, code = 504, "deadline_exceeded"


class ConfigError(GearshiftError):
    """The configuration is wrong. `problems` has one line each, with its path."""

    status, type, code = 400, "invalid_request_error", "invalid_config"

    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param, retry_after_s)
        self.problems: list[str] = message.splitlines()


class WeightsError(GearshiftError):
    """Weights could not be fetched, verified or converted. Seen by operators only."""

    code = "weights_unavailable"


def all_errors() -> dict[str, type[GearshiftError]]:
    """Every class of the tree by name; what the wire decodes with."""
    found: dict[str, type[GearshiftError]] = {}
    pending: list[type[GearshiftError]] = [GearshiftError]
    while pending:
        cls = pending.pop()
        found[cls.__name__] = cls
        pending += cls.__subclasses__()
    return found


def public(error: BaseException) -> GearshiftError:
    """What a client may see of `error`: ours as it is, anything else without its text.

    A Ray task error wraps the original in `cause`; it may be an instance of the original's class too, but without its
    attributes and with a remote traceback for a text: it is unwrapped here, and only here.
    """
    cause = getattr(error, "cause", None)
    original = cause if isinstance(cause, BaseException) else error
    if isinstance(original, GearshiftError):
        return original
    return InternalError("The server had an internal error. Quote the x-request-id when you report it.")
