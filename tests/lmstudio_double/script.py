"""The parts that tests plug into the double beyond the simulator's: faults, gates, and the SDK's behavior.

The `Sdk` part is of the protocol that `rpc` speaks. It generates and loads nothing; a request to do so is a `fault`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, get_args

from litellm_compaction.simulator import simulator as simulated
from litellm_compaction.simulator.messages import JsonObject
from litellm_compaction.simulator.simulator import ChatCall

Outcome = Literal["running", "ok", "error", "overflow", "mid_overflow", "pool_overflow", "fault", "disconnected"]
ReasoningField = Literal["reasoning_content", "reasoning", "think"]
FaultKind = Literal["500", "drop", "hang", "empty", "error_event", "slow"]
FaultPoint = Literal["before_first_delta", "mid_text"]


@dataclass(frozen=True)
class Fault:
    """One failure of the server; `after_tokens` None means half of the answer (only for mid_text)."""

    kind: FaultKind
    at: FaultPoint = "before_first_delta"
    _: KW_ONLY
    after_tokens: int | None = None
    message: str = "generation failed"
    status: int = 500
    delay_ms: int = 1000


class Gate(threading.Event):
    """A point at which an answer waits until the gate is set; `reached` is set when the answer gets there."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def open(self) -> None:
        """Let the answer go on; the same as `set`."""
        self.set()


@dataclass(frozen=True)
class Reply(simulated.Reply):
    """An answer that the model generates.

    `tool_calls` are (name, JSON arguments). `gate` holds the answer after `gate_after_tokens` generated tokens, 0 being
    before the first delta; a plain `threading.Event` serves too. `status` makes `content` a plain HTTP error.
    """

    _: KW_ONLY
    gate: threading.Event | None = None
    gate_after_tokens: int = 0
    fault: Fault | None = None
    status: int | None = None
    tokens_per_second: float | None = None
    chunk_tokens: int | None = None


Script = Callable[[ChatCall], "Reply | None"]


def numbered_words(n: int, start: int = 1) -> str:
    """The text `word1 word2 …` with n words, in which every loss and repetition shows."""
    return " ".join(f"word{number}" for number in range(start, start + n))


def summary_of_facts(prompt_text: str, facts: Iterable[str], keep_ratio: float = 1.0) -> str:
    """A structured markdown summary with a share of those `facts` that stand literally in `prompt_text`.

    Which ones survive depends only on the fact's own text.
    """
    return _summary([fact for fact in facts if fact in prompt_text and _stable_ratio(fact) < keep_ratio])


def _summary(facts: list[str]) -> str:
    lines = "\n".join(f"- {fact}" for fact in facts) or "- none"
    return (
        "## Original task\nContinue the work that the user asked for.\n\n"
        f"## Key decisions and facts\n{lines}\n\n"
        f"## Current state\n{len(facts)} facts are carried over from the conversation.\n\n"
        "## Pending\n- [ ] Answer the newest request."
    )


def _stable_ratio(text: str) -> float:
    digest = hashlib.sha256(text.encode("utf-8", errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


# no_upgrade     HTTP 404 in place of the socket, as of a reverse proxy that passes no upgrade
# error_200      HTTP 200 with LM Studio's error body, as it answers unknown paths (hermes-agent)
# no_handshake   the upgrade is never answered, as of a path that LM Studio's socket server does not know
# refused_key    the key is refused, whichever it is, and the socket closed
# mute           the socket opens, the key is never answered
# silent         the key is accepted, no call is answered
# late           each answer comes after 3 s
# closes         the connection is cut when a call has come
# garbage        answers are no JSON
# wrong_shape    answers are JSON, of another shape than any that is known
# huge           answers are followed by 32 MB of spaces, which JSON allows
# unknown        no endpoint of `unknown` is known; a warning says so, without the id of the call
# busy           the template and the tokenizer wait until the instance generates nothing
_Closed = Literal["no_upgrade", "error_200", "no_handshake", "refused_key", "mute"]
_Odd = Literal["silent", "late", "closes", "garbage", "wrong_shape", "huge", "unknown", "busy"]
SdkMode = Literal["fine", _Closed, _Odd]
SDK_MODES: tuple[SdkMode, ...] = get_args(SdkMode)


@dataclass(eq=False, kw_only=True)
class SdkCall:
    """One message of a client; `endpoint` is "" for a message without one, such as keepAlive."""

    kind: str
    endpoint: str
    parameter: object
    is_fault: bool = False


@dataclass(eq=False, kw_only=True)
class SdkSocket:
    """One connection, or an attempt at one; `namespace` is its path without the slash."""

    namespace: str
    is_accepted: bool = False
    closed_s: float | None = None


@dataclass(eq=False, kw_only=True)
class Sdk:
    """The protocol's behavior, and the record of its calls; settings may be changed while the simulator serves.

    `tokens_factor` makes its counts differ from the server's own `usage`; `unknown` are the
    endpoints that an older server does not have (all of them while it is empty), for the mode of that name.
    """

    mode: SdkMode = "fine"
    tokens_factor: float = 1.0
    unknown: frozenset[str] = frozenset()
    overflow_policy: Literal["stopAtLimit", "truncateMiddle", "rollingWindow"] = "truncateMiddle"
    sockets: list[SdkSocket] = field(default_factory=list, init=False)
    calls: list[SdkCall] = field(default_factory=list, init=False)

    def faults(self) -> list[SdkCall]:
        """Returns the calls that a counting client must never make: channels, signals, loading and unloading."""
        return [call for call in self.calls if call.is_fault]

    def open_sockets(self) -> list[SdkSocket]:
        """Returns the connections that were accepted and not closed since."""
        return [socket for socket in self.sockets if socket.is_accepted and socket.closed_s is None]

    def endpoints(self) -> list[str]:
        return [call.endpoint for call in self.calls if call.kind == "rpcCall"]

    def parameters(self, endpoint: str) -> list[JsonObject]:
        return [call.parameter for call in self.calls if call.endpoint == endpoint and isinstance(call.parameter, dict)]
