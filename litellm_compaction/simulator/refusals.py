"""What LM Studio says when it refuses: each status, body shape, and wording.

Each names the report that shows it, or says that the wording is ours. Raised as `Refusal` anywhere in the
simulator and turned into a response in one place. `bt#N` is issue N of
github.com/lmstudio-ai/lmstudio-bug-tracker.
"""

from __future__ import annotations

from typing import Any, Literal

JsonObject = dict[str, Any]
ErrorShape = Literal["string", "object"]
RefusalOutcome = Literal["ok", "error", "overflow", "pool_overflow", "fault"]
NKeepWording = Literal["number_of_tokens", "trying_to_keep", "cannot_truncate"]

POOL_EXCEEDED = "Context size has been exceeded."  # bt#1620, bt#1757, bt#2201
CRASHED = (  # bt#932, bt#1057
    "The model has crashed without additional information. (Exit code: 18446744072635812000). "
    "Error Data: n/a, Additional Data: n/a"
)
MODEL_UNLOADED = "Model unloaded."  # that eviction cuts a generation is bt#671; the wording is ours


class Refusal(Exception):
    """An answer that replaces a generation: an HTTP status and a body (JSON; text and bytes as they are)."""

    def __init__(self, status: int, body: object, *, outcome: RefusalOutcome = "error") -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body: Any = body
        self.outcome: RefusalOutcome = outcome


def error_body(message: str, shape: ErrorShape, *, code: str | None = None) -> JsonObject:
    """The JSON of an error: a bare string until early 0.4 (openclaude#353), an object later (bt#1730)."""
    if shape == "string":
        return {"error": message}
    return {"error": {"message": message, "type": "invalid_request_error", "param": "model", "code": code}}


def event_body(message: str) -> JsonObject:
    """The data of `event: error` inside HTTP 200, the message twice (verbatim from goose#11318, 0.4.21)."""
    return {"error": {"message": message}, "message": message}


def unknown_path(method: str, path: str) -> JsonObject:
    """The error body for an unknown path; hermes-agent saw it with HTTP 200, the wording is ours."""
    return {"error": f"Unexpected endpoint or method. ({method} {path})"}


def bad_payload(reason: str) -> Refusal:
    """The 400 for a request body of the wrong form; shape as LM Studio's, wording ours."""
    return Refusal(400, {"error": f"Invalid 'messages' in payload: {reason}"})


def bad_field(message: str) -> Refusal:
    return Refusal(400, {"error": message})


def template_failed(reason: str, shape: ErrorShape) -> Refusal:
    """The 400 around an exception of the chat template (bt#1054, bt#1586, bt#2219)."""
    message = (
        f'Error rendering prompt with jinja template: "{reason}". '
        "This is usually an issue with the model's prompt template."
    )
    return Refusal(400, error_body(message, shape))


def unauthorized() -> Refusal:
    """The 401 for a missing or wrong API token; LM Studio's own body is not documented, this one is ours."""
    message = "Malformed LM Studio API token provided. Send it as 'Authorization: Bearer <token>'."
    body = {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
    return Refusal(401, body)


def no_models_loaded() -> Refusal:
    """The 404 when nothing is loaded and nothing can be loaded (verbatim from Orpheus-TTS#229)."""
    message = "No models loaded. Please load a model in the developer page or use the `lms load` command."
    return Refusal(404, error_body(message, "object", code="model_not_found"))


def model_not_found(name: str) -> Refusal:
    """The 404 for a model that is not downloaded or may not be loaded; the wording is ours."""
    return Refusal(404, error_body(f"Model '{name}' not found", "object", code="model_not_found"))


def n_keep_too_long(keep_tokens: int, window_tokens: int, wording: NKeepWording) -> Refusal:
    """The 400 when even the part that must stay exceeds the window.

    The three wordings are those of 0.3.x late (openclaude#353), 0.3.x early (bt#237), and 0.4.0
    (opencode#11141).
    """
    advice = "Try to load the model with a larger context length, or provide a shorter input."
    if wording == "trying_to_keep":
        message = (
            f"Trying to keep the first {keep_tokens} tokens when context the overflows. However, the model "
            f"is loaded with context length of only {window_tokens} tokens, which is not enough. {advice}"
        )
    elif wording == "cannot_truncate":
        message = f"Cannot truncate prompt with n_keep ({keep_tokens}) >= n_ctx ({window_tokens})"
    else:
        message = (
            "The number of tokens to keep from the initial prompt is greater than the context length "
            f"(n_keep: {keep_tokens}>= n_ctx: {window_tokens}). {advice}"
        )
    return Refusal(400, {"error": message}, outcome="overflow")


def does_not_fit(prompt_tokens: int, window_tokens: int) -> str:
    """The overflow message of 0.4.20 and later (verbatim from goose#11318)."""
    return (
        f"Input does not fit in context length. The input has {prompt_tokens} tokens, "
        f"but the context length only supports {window_tokens} tokens."
    )
