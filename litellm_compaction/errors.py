"""The package's errors as one tree, and how an overflow looks when a server reports it.

A message says what happened, the numbers with their units and what to change, and has no text of a conversation.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# How `windows/fetch.py` names the server.
_ASKED = re.compile(r"GET \S+(?=:)")
_START_IT = "Start its server (lms server start) or correct api_base."
# Status, kind and param of what another server, or the same one later, may serve.
_DOWN = 503, "service_unavailable", None


class CompactionError(Exception):
    """Anything that this package raises on purpose, with the fields of OpenAI's errors by which clients read it."""

    status: int = 400
    kind: str = "invalid_request_error"
    param: str | None = "model"
    code: str = ""  # By which clients compact their side.
    without_address: str = ""  # The message for clients, if the operator's own has the address of a server.

    @property
    def for_clients(self) -> str:
        return self.without_address or str(self)


class ConfigError(CompactionError, ValueError):
    """A setting is unknown or has a bad value: names key, value and allowed range."""


class WindowUnknown(CompactionError):
    """No source says with which context length a model is loaded."""

    def __init__(self, model: str, *, tried: str = "") -> None:
        detail = f" Tried: {tried}." if tried else ""
        said = f"Context limit not available for {model}. Please ensure model metadata is correct."
        super().__init__(f"{said}{detail}")
        self.model, self.without_address = model, f"{said}{_ASKED.sub('its server', detail)}"


class WindowUnread(WindowUnknown):
    """The server that knows it does not answer now; `address` is LM Studio's, "" for other servers."""

    status, kind, param = _DOWN

    def __init__(self, model: str, *, tried: str = "", address: str = "") -> None:
        super().__init__(model, tried=tried)
        if address:
            self.args = (f"{ServerGone(address)} {self}",)
        # How the connection failed can name the server.
        todo = f" {_START_IT}" if address else ""
        self.without_address = f"{WindowUnknown(model)} Its server does not answer.{todo}"


class ModelNotLoaded(CompactionError):
    """LM Studio knows the model but has not loaded it, so it has no window yet."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} is not loaded in LM Studio, so its context length is not known yet. "
            "Load it, or set `when_not_loaded: warm_up`."
        )


class Share(NamedTuple):
    """One row of an itemised error."""

    name: str
    tokens: int


class DoesNotFit(CompactionError):
    """A request cannot be made small enough for the window, but for one of `needed_tokens`; largest `shares` first."""

    param, code = "messages", "context_length_exceeded"

    def __init__(self, message: str, *, shares: tuple[Share, ...], window_tokens: int, needed_tokens: int) -> None:
        super().__init__(message)
        self.shares = shares
        self.window_tokens = window_tokens
        self.needed_tokens = needed_tokens


class BadWish(CompactionError):
    """A client's wish has an unknown shape; the message lists the allowed ones and never quotes the client."""

    param = "metadata"


NO_CHAT = (
    "This route is not served for this model, since its context would not be guarded there. Send a chat completion, a "
    "message, a response, a completion or generateContent."
)
TOO_DEEP = "The request is nested too deep to be read: send fewer than 900 levels of lists and objects in each other."
OWN_TEMPLATE = (
    "The request brings its own chat_template, so nobody can say how many tokens its prompt takes: leave it out, or "
    "have the model served with that template (vLLM: --chat-template)."
)


class NotServed(CompactionError):
    """No deployment serves a request as it is; it says what is wrong in `field`, without quoting the client."""

    def __init__(self, message: str, field: str = "model") -> None:
        super().__init__(message)
        self.param = field


class BadItem(NotServed):
    """A request's own word about its context is none that can be followed; `why` ends a sentence about it."""

    def __init__(self, field: str, why: str) -> None:
        what = f"`{field}` {why}. Send it as the protocol has it, or the messages themselves in its place."
        super().__init__(what, field)


class SummaryFailed(CompactionError):
    """The pruning model gave no usable text; `reason` is one word for logs and metrics."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Overloaded(CompactionError):
    """A request waited too long for room beside the others that share the context of a model, or of an instance."""

    status, kind, param = 503, "overloaded_error", None

    def __init__(self, model: str, *, tokens: int, in_use_tokens: int, window_tokens: int, waited_s: float) -> None:
        super().__init__(
            f"{model} is busy: a request for {tokens} tokens found no room in {waited_s:.1f} s; parallel requests "
            f"share one context length and use {in_use_tokens} of its {window_tokens} tokens. Send fewer requests "
            "in parallel, or load the model with a larger context length."
        )


class ClientLeft(NotServed):
    """The work for a client was ended, since it had left, or had not read its answer for a while."""

    status, kind = 499, "client_disconnect"

    def __init__(self) -> None:
        super().__init__("The answer was ended: its client had read nothing for 30 s, or had left. Send it again.")


class ServerUnavailable(CompactionError):
    """A server did not answer, or its answer is not of the expected API."""

    status, kind, param = _DOWN
    without_address = "The model's server does not answer as expected."


class ServerGone(ServerUnavailable):
    """LM Studio takes no connection, though it did when its windows were read."""

    without_address = f"LM Studio does not answer. {_START_IT}"

    def __init__(self, address: str) -> None:
        super().__init__(f"LM Studio at {address} does not answer. {_START_IT}")


class LiteLLMChanged(CompactionError):
    """LiteLLM lacks something by which requests are guarded, or it does something else now; `member` is its name."""

    status, kind, param = _DOWN

    def __init__(self, member: str, remedy: str = "") -> None:
        super().__init__(
            f"The guard cannot stand in this LiteLLM: {member} is missing or has changed. Nothing is sent to guarded "
            "models, whose servers could cut a conversation in silence. Install a LiteLLM that litellm-compaction "
            f"supports, or a newer litellm-compaction. {remedy}".rstrip()
        )


class StoreError(CompactionError):
    """A store cannot be opened or does not work; requests go on without it."""


class TooLargeForStore(StoreError):
    """A store works, but does not take this value, now or later."""


class Overflow(NamedTuple):
    """The numbers in an overflow message, by the server's own count; None if it does not name one."""

    prompt_tokens: int | None
    window_tokens: int | None


# Wordings of LM Studio by version, of llama.cpp and vLLM. # is a number: (prompt, window), 0 = not named.
_OVERFLOWS: tuple[tuple[re.Pattern[str], int, int], ...] = tuple(
    (re.compile(pattern.replace("#", r"(\d{1,12})(?!\d)"), re.IGNORECASE | re.DOTALL), prompt, window)
    for pattern, prompt, window in (
        (r"input has # tokens, but the context length only supports #", 1, 2),
        (r"n_keep:? ?\(?#\)? ?>= ?n_ctx:? ?\(?#", 1, 2),
        (r"keep the first # tokens when context the overflows.{0,200}?context length of only #", 1, 2),
        (r"reached context length of # tokens", 0, 1),
        (r"request \(# tokens\) exceeds the available context size \(# tokens\)", 1, 2),
        (r"maximum context length is # tokens.{0,200}?resulted in # tokens", 2, 1),
        (r"maximum context length is # tokens", 0, 1),
        (r'n_prompt_tokens\\*" ?: ?#.{0,100}?n_ctx\\*" ?: ?#', 1, 2),
        # Without numbers: of LM Studio, llama.cpp, and Ollama's older and newer runners (llm/llama_server.go).
        (r"(exceeds|greater than|longer than|does not fit in) (the )?(available )?context (length|size)", 0, 0),
        (r"context size has been exceeded|exceed_context_size_error", 0, 0),
    )
)


# Servers that quote a refused request may quote megabytes; their own words come first or soon.
_MAX_ERROR_CHARS = 20_000


def is_crash(text: str) -> bool:
    """Returns True if `text` reports a generation that broke down; near a full window an overflow looks like that."""
    # Some versions of LM Studio report an overflow so, and other trouble, too.
    return re.search(r"generation failed|model (has )?crashed|failed to generate", text, re.IGNORECASE) is not None


def ended_early(text: str) -> bool:
    """Returns True if `text` reports a stream that ended without saying why; an overflow can look like that, too."""
    # LiteLLM's streaming_handler.py, `_stream_eof_error`.
    return "Stream ended before a finish_reason was received" in text


def overflow_from_text(text: str, client_text: str = "") -> Overflow | None:
    """The numbers in a server's `text` if it is one of the known overflow messages, else None.

    Servers quote a request that they refuse, so words of `client_text` that look like such a message are not one.
    """
    text = text[:_MAX_ERROR_CHARS]
    for pattern, prompt, window in _OVERFLOWS:
        for found in pattern.finditer(text):
            if client_text and _holds(client_text, found[0]):
                continue
            return Overflow(int(found[prompt]) if prompt else None, int(found[window]) if window else None)
    return None


def _holds(client_text: str, words: str) -> bool:
    """Returns True if a text has these words in a row, however they are written and quoted; in one search of 50 MB."""
    wanted = r"\W+".join(map(re.escape, re.findall(r"\w+", words.casefold())))
    return re.search(wanted, client_text.casefold()) is not None
