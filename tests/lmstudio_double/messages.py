"""LM Studio's refusals beyond those of the simulator, in the words of its versions.

Each names the report that shows it, or says that the wording is ours. `bt#N` is issue N of
github.com/lmstudio-ai/lmstudio-bug-tracker.
"""

from __future__ import annotations

from typing import Any

from litellm_compaction.simulator.messages import JsonObject, Refusal

# Above every vocabulary; larger numbers fit no id.
_MOST_IDS = 2**31
POOL_EXCEEDED = "Context size has been exceeded."  # bt#1620, bt#1757, bt#2201
MODEL_UNLOADED = "Model unloaded."  # that eviction cuts a generation is bt#671; the wording is ours


def ids_of(prompt: object) -> tuple[int, ...]:
    """The token ids of a text completion's prompt, or of several, as llama.cpp takes them; empty if it is none.

    It answers several side by side in its one cache: here they are one prompt that fills as much.
    """
    pieces: list[Any] = prompt if isinstance(prompt, list) else []
    flat = [piece for each in pieces for piece in (each if isinstance(each, list) else [each])]
    return tuple(flat) if all(type(piece) is int and 0 <= piece < _MOST_IDS for piece in flat) else ()


def event_body(message: str) -> JsonObject:
    """The data of `event: error` inside HTTP 200, the message twice (verbatim from goose#11318, 0.4.21)."""
    return {"error": {"message": message}, "message": message}


def unauthorized() -> Refusal:
    """The 401 for a missing or wrong API token; LM Studio's own body is not documented, this one is ours."""
    message = "Malformed LM Studio API token provided. Send it as 'Authorization: Bearer <token>'."
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    return Refusal(401, {"error": error})


def n_keep_too_long(keep_tokens: int, window_tokens: int) -> Refusal:
    """The 400 when even the part that must stay exceeds the window, in the words of 0.3.x (openclaude#353)."""
    message = (
        "The number of tokens to keep from the initial prompt is greater than the context length "
        f"(n_keep: {keep_tokens}>= n_ctx: {window_tokens}). "
        "Try to load the model with a larger context length, or provide a shorter input."
    )
    return Refusal(400, {"error": message}, outcome="overflow")


def does_not_fit(prompt_tokens: int, window_tokens: int) -> str:
    """The overflow message of 0.4.20 and later (verbatim from goose#11318)."""
    return (
        f"Input does not fit in context length. The input has {prompt_tokens} tokens, "
        f"but the context length only supports {window_tokens} tokens."
    )
