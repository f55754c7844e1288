"""Tells clients, on every route alike, and the log why a request cannot be served.

An error of ours is one value, with its words and its status; here it takes the shape of each place that asks for it:
LiteLLM's hooks, its router, and the transport, which answers as a server would. Never with a server's address: a client
has no business with it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import litellm
from fastapi import HTTPException

from litellm_compaction.concurrency import Bounded
from litellm_compaction.engine import RequestContext
from litellm_compaction.errors import ClientLeft, CompactionError, DoesNotFit, NotServed, ServerGone, overflow_from_text
from litellm_compaction.proxy.litellm_inside import Seam

logger = logging.getLogger("litellm_compaction")
_LOGGED_FRAMES = 4
_ProxyException: Any = Seam.REFUSAL.needed()
# The last refusals in words: LiteLLM logs its errors with them, after us and with up to three tracebacks each.
_told: Bounded[str, None] = Bounded(64)
# LiteLLM reads this wording as ContextWindowExceededError, so that the fallbacks for it fire.
RECOGNIZED = "(exceeds the available context size)"
# LM Studio says of the same overflow the first on its route for chats, the second on others.
_OVERFLOW_STATUSES = (400, 500)


class _Detailed(HTTPException):
    """LiteLLM takes an HTTPException only from a failure hook."""

    def __init__(self, message: str) -> None:
        super().__init__(status_code=400, detail=message)


class Refusal(_ProxyException, _Detailed):  # type: ignore[misc] # LiteLLM is not typed strictly enough to check
    """LiteLLM's own error for clients with a `code` that LiteLLM would replace by the status."""

    def __init__(self, error: CompactionError) -> None:
        super().__init__(  # type: ignore[call-arg] # as above
            message=_words(error),
            type=error.kind,
            param=error.param,
            code=error.status,
            openai_code=error.code or None,
        )
        self.status_code = error.status

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "code": str(self.openai_code)}


def _words(error: CompactionError) -> str:
    _told[error.for_clients] = None
    return error.for_clients


def litellm_error_of(error: CompactionError, kwargs: Mapping[str, Any]) -> Exception:
    """The error after routing, as LiteLLM's own class, from which its router picks the next attempt.

    Too large: `context_window_fallbacks` fire. Window unknown: a 400, or an error after which the router tries another
    deployment of the group, unless none could serve it. A server that does not answer is not asked again.
    """
    others = int((kwargs.get("metadata") or {}).get("model_group_size") or 1) > 1
    is_down = error.status == 503
    may_go_on = (others or is_down) and not isinstance(error, NotServed)
    kind = litellm.ServiceUnavailableError if may_go_on else litellm.BadRequestError
    if isinstance(error, DoesNotFit):
        kind = litellm.ContextWindowExceededError
    provider = str(kwargs.get("custom_llm_provider") or "lm_studio")
    mapped: Exception = kind(message=_words(error), model=str(kwargs.get("model") or ""), llm_provider=provider)
    if is_down and not others:
        mapped.num_retries = 0  # type: ignore[attr-defined] # the router reads it
    return mapped


def response_of(error: CompactionError) -> httpx.Response:
    """The refusal as the answer of a server, which LiteLLM maps: 400 to its BadRequestError, 503 to a fallback."""
    return bad_request(_words(error), error.status, error.kind)


def bad_request(message: str, status: int, kind: str = CompactionError.kind) -> httpx.Response:
    """A server's refusal in OpenAI's shape."""
    return httpx.Response(status, json={"error": {"message": message, "type": kind}})


def reworded(
    refused: CompactionError | None, original: Exception, *, is_guarded: bool, client_text: Callable[[], str] = str
) -> Refusal | None:
    """A client's error in place of LiteLLM's framed one, whose code is the status; None if it may stay as it is."""
    if isinstance(original, Refusal):
        return None
    # On its way LiteLLM quotes a message, with quotation marks of its own in a name as others.
    is_same_kind = isinstance(refused, DoesNotFit) and isinstance(original, litellm.ContextWindowExceededError)
    if refused is not None and (is_same_kind or refused.for_clients in str(original)):
        return Refusal(refused)
    # LiteLLM does not know all servers' words for it.
    text = str(original) if getattr(original, "status_code", None) in _OVERFLOW_STATUSES else ""
    said = overflow_from_text(text) and overflow_from_text(text, client_text())
    if not is_guarded or (said is None and not isinstance(original, litellm.ContextWindowExceededError)):
        return None
    prompt_tokens, window_tokens = said or (None, None)
    needs = f" of {prompt_tokens} tokens" if prompt_tokens else ""
    has = f" of {window_tokens} tokens" if window_tokens else ""
    message = f"The model's server has refused the prompt{needs}: it exceeds the context length{has}."
    return Refusal(DoesNotFit(message, shares=(), window_tokens=window_tokens or 0, needed_tokens=0))


def server_gone(error: Exception, context: RequestContext) -> ServerGone | None:
    """The refusal for an LM Studio that has taken no connection for a request; None for any other error."""
    address = context.target.lmstudio_address
    # A certificate that is refused is no reason to start a server.
    is_gone = isinstance(error, httpx.ConnectError) and "SSL" not in str(error)
    return ServerGone(address) if address and is_gone else None


# ------------------------------------------------------------------ the log


def log_failure(place: str, error: Exception, *, is_too_long: bool = False) -> None:
    """Logs an error in a hook by the lines that it came from, without its message: that may quote a conversation."""
    kind = "failed_closed" if is_too_long else "failed_open"
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
    """Logs in one line why a request was refused; not a client's leaving, nor `DoesNotFit`, which the engine logs."""
    if not isinstance(error, (ClientLeft, DoesNotFit)):
        logger.warning("refused model=%s: %s", model, error)


def _is_litellms(record: logging.LogRecord) -> bool:
    """Has LiteLLM not log our refusals, which we log ourselves."""
    errors = [str(value) for value in record.args or () if isinstance(value, Exception)]
    return not any(words in error for error in errors for words in list(_told))


# Before LiteLLM's own filters, which write the error into the message.
logging.getLogger("LiteLLM Proxy").filters.insert(0, _is_litellms)
