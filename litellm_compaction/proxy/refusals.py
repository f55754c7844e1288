"""Tells clients, on every route alike, and the log why a request cannot be served.

The callback raises these errors to LiteLLM, the transport answers with them as a server would. Never with a server's
address: a client has no business with it.
"""

from __future__ import annotations

import logging
import re
import ssl
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import litellm
from fastapi import HTTPException

from litellm_compaction import errors
from litellm_compaction.engine import RequestContext
from litellm_compaction.errors import CompactionError, DoesNotFit, NotServed, overflow_from_text
from litellm_compaction.proxy.litellm_inside import Seam

logger = logging.getLogger("litellm_compaction")
_LOGGED_FRAMES, _MOST_CAUSES = 4, 10
_ProxyException: Any = Seam.REFUSAL.needed()
# Marks an error of LiteLLM's as a refusal of ours that is logged.
_TOLD = "is_told_by_litellm_compaction"
# LiteLLM reads this wording as ContextWindowExceededError, so that the fallbacks for it fire.
RECOGNIZED = "(exceeds the available context size)"
# LiteLLM's words around a server's.
_FRAME_BEFORE = re.compile(r"\A(?:litellm\.\w+: |\w+Exception - |Error code: \d+ - )+")
_NOTES = "Set 'context_window_fallback'|LiteLLM: model group |Received Model Group="
_FRAME_BEHIND = re.compile(rf"(?: ?{re.escape(RECOGNIZED)}|(?<!\s)\s*(?:{_NOTES}).*)+\Z", re.DOTALL)
# LM Studio says of the same overflow the first on its route for chats, the second on others.
_OVERFLOW_STATUSES = (400, 500)
_INVALID = "invalid_request_error"


class _Kind(NamedTuple):
    """What a client reads of an error; `code` is OpenAI's, by which clients compact their side."""

    status: int = 400
    kind: str = _INVALID
    param: str | None = "model"
    code: str = ""


_OVERFLOW = _Kind(param="messages", code="context_length_exceeded")
_DOWN = _Kind(503, "service_unavailable", None)
_KINDS: Mapping[type[CompactionError], _Kind] = {
    DoesNotFit: _OVERFLOW,
    errors.BadWish: _Kind(param="metadata"),
    errors.Overloaded: _DOWN._replace(kind="overloaded_error"),
    **dict.fromkeys((errors.WindowUnread, errors.LiteLLMChanged, errors.ServerUnavailable), _DOWN),
}


def _kind(error: CompactionError) -> _Kind:
    if isinstance(error, NotServed):
        return _Kind(param=error.field)
    return next((kind for each, kind in _KINDS.items() if isinstance(error, each)), _Kind())


class _Detailed(HTTPException):
    """LiteLLM takes an HTTPException only from a failure hook."""

    def __init__(self, message: str) -> None:
        super().__init__(status_code=400, detail=message)


class Refusal(_ProxyException, _Detailed):  # type: ignore[misc] # LiteLLM is not typed strictly enough to check
    """LiteLLM's own error for clients with a `code` that LiteLLM would replace by the status."""

    def __init__(self, message: str, kind: _Kind) -> None:
        super().__init__(  # type: ignore[call-arg] # as above
            message=message, type=kind.kind, param=kind.param, code=kind.status, openai_code=kind.code or None
        )
        self.status_code = kind.status
        self._code = kind.code

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = super().to_dict()
        return {**fields, "code": self._code} if self._code else fields


def refusal_of(error: CompactionError) -> Refusal:
    """The refusal for a client, in the cleanest shape that the proxy knows."""
    return Refusal(error.for_clients, _kind(error))


def litellm_error_of(error: CompactionError, kwargs: Mapping[str, Any]) -> Exception:
    """The error after routing, as LiteLLM's own class, from which its router picks the next attempt.

    Too large: `context_window_fallbacks` fire. Window unknown: a 400, or an error after which the router tries another
    deployment of the group, unless none could serve it. A server that does not answer is not asked again.
    """
    others = int((kwargs.get("metadata") or {}).get("model_group_size") or 1) > 1
    is_down = _kind(error).status == 503
    may_go_on = (others or is_down) and not isinstance(error, NotServed)
    kind = litellm.ServiceUnavailableError if may_go_on else litellm.BadRequestError
    if isinstance(error, DoesNotFit):
        kind = litellm.ContextWindowExceededError
    provider = str(kwargs.get("custom_llm_provider") or "lm_studio")
    mapped: Exception = kind(message=error.for_clients, model=str(kwargs.get("model") or ""), llm_provider=provider)
    if is_down and not others:
        mapped.num_retries = 0  # type: ignore[attr-defined] # the router reads it
    return mapped


def response_of(error: CompactionError) -> httpx.Response:
    """The refusal as the answer of a server, which LiteLLM maps: 400 to its BadRequestError, 503 to a fallback."""
    kind = _kind(error)
    return bad_request(error.for_clients, kind.status, kind.kind)


def bad_request(message: str, status: int = 400, kind: str = _INVALID) -> httpx.Response:
    """A server's refusal in OpenAI's shape."""
    return httpx.Response(status, json={"error": {"message": message, "type": kind}})


def reworded(
    refused: CompactionError | None, original: Exception, *, is_guarded: bool, client_text: Callable[[], str] = str
) -> Refusal | None:
    """A client's error in place of LiteLLM's framed one, whose code is the status; None if it may stay as it is."""
    if isinstance(original, Refusal):
        return None
    if refused is not None and _is_told(original, refused):
        # LiteLLM logs it before the failure hook on most routes, after it on /v1/messages and /v1/completions.
        mark_told(original)
        return refusal_of(refused)
    # LiteLLM does not know all servers' words for it.
    text = str(original) if getattr(original, "status_code", None) in _OVERFLOW_STATUSES else ""
    is_said = overflow_from_text(text) is not None and overflow_from_text(text, client_text()) is not None
    if not is_guarded or not (is_said or isinstance(original, litellm.ContextWindowExceededError)):
        return None
    message = str(getattr(original, "message", original))
    return Refusal(_FRAME_BEHIND.sub("", _FRAME_BEFORE.sub("", message)) or message, _OVERFLOW)


def server_gone(error: httpx.TransportError, context: RequestContext) -> errors.ServerGone | None:
    """The refusal for an LM Studio that has taken no connection for a request; None for any other error."""
    address, causes = context.target.lmstudio_address, list[BaseException]([error])
    while len(causes) < _MOST_CAUSES and (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    # A certificate that is refused is no reason to start a server.
    is_of_certificate = any(isinstance(each, ssl.SSLError) for each in causes)
    is_gone = address and isinstance(error, httpx.ConnectError) and not is_of_certificate
    return errors.ServerGone(address) if is_gone else None


# ------------------------------------------------------------------ the log


def log_failure(place: str, error: Exception, *, too_long: DoesNotFit | None = None) -> None:
    """Logs an error in a hook by the lines that it came from, without its message: that may quote a conversation."""
    kind = "failed_open" if too_long is None else "failed_closed"
    frames = traceback.extract_tb(error.__traceback__)[: -_LOGGED_FRAMES - 1 : -1]
    lines = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    logger.error("%s hook=%s error=%s at=%s", kind, place, type(error).__name__, lines)


@contextmanager
def failing_open(place: str) -> Iterator[None]:
    """The client gets the server's own answer or error, not one of ours (P8)."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - fails open (P8)
        log_failure(place, error)


def log_refused(model: str, error: CompactionError) -> None:
    """Logs in one line why a request was refused; the engine logs `DoesNotFit`, with its numbers."""
    if not isinstance(error, DoesNotFit):
        logger.warning("refused model=%s: %s", model, error)


def mark_told(error: object) -> None:
    """Marks an error of LiteLLM's as one that we tell clients and the log in our words."""
    setattr(error, _TOLD, True)


def _is_told(error: Exception, refused: CompactionError | None) -> bool:
    is_marked = isinstance(error, Refusal) or getattr(error, _TOLD, False)
    return is_marked or (refused is not None and refused.for_clients in str(error))


class ToldOnce(logging.Filter):
    """Keeps our logged refusals out of LiteLLM's log, in which each has up to three tracebacks.

    Args:
        refusal: gives the last refusal of the running task's request.
    """

    def __init__(self, refusal: Callable[[], CompactionError | None]) -> None:
        super().__init__()
        self._refusal = refusal

    def install(self) -> None:
        """Stands before LiteLLM's own filters, which write the error into the message; once in each process."""
        filters = logging.getLogger("LiteLLM Proxy").filters
        filters[:] = [self, *(each for each in filters if not isinstance(each, ToldOnce))]

    def filter(self, record: logging.LogRecord) -> bool:
        told = [value for value in record.args or () if isinstance(value, Exception)]
        return not any(_is_told(error, self._refusal()) for error in told)
