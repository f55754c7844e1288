"""What the simulator remembers of each request: the witness that tests read.

A record is appended when the request arrives and filled in while it is served; once `outcome` is not
"running" it does not change any more, except that `disconnected_s` may follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["running", "ok", "error", "overflow", "mid_overflow", "pool_overflow", "fault", "disconnected"]


@dataclass(kw_only=True)
class RequestRecord:
    """One request. Token counts are the server's own (scaled); times are `time.monotonic()` seconds.

    `prompt_tokens` counts what was sent, `kept_tokens` what was left of it after truncation; of these
    `cached_tokens` came from the KV cache and `computed_tokens` had to be computed. `body` is the parsed
    JSON, None for a GET or for bytes that are not a JSON object. Header names are lower case.
    """

    path: str
    method: str
    headers: dict[str, str]
    started_s: float
    body: dict[str, Any] | None = None
    model: str = ""
    instance_id: str = ""
    context_length: int = 0
    prompt_tokens: int = 0
    truncated: bool = False
    kept_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    content: str = ""
    finish_reason: str | None = None
    outcome: Outcome = "running"
    error: str = ""
    status: int = 0
    streamed: bool = False
    first_delta_s: float | None = None
    ended_s: float | None = None
    disconnected_s: float | None = None
    seen_text: str = field(default="", repr=False)
