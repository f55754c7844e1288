"""What tests hold of the protocol of LM Studio's SDKs: how harsh the double is, and what was asked of it.

The protocol itself is `rpc`. Nothing here generates or loads; a request that would is a `fault` of the client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from litellm_compaction.simulator.refusals import JsonObject

# no_upgrade     HTTP 404 in place of the socket, as of a reverse proxy that passes no upgrade
# error_200      HTTP 200 with LM Studio's error body, as it answers unknown paths (hermes-agent)
# no_handshake   the upgrade is never answered, as of a path that LM Studio's socket server does not know
# refused_key    the key is refused, whichever it is, and the socket closed
# mute           the socket opens, the key is never answered
# silent         the key is accepted, no call is answered
# late           each answer comes after `late_s`
# closes         the connection is cut when a call has come
# garbage        answers are no JSON
# wrong_shape    answers are JSON, of another shape than any that is known
# huge           answers are followed by 32 MB of spaces, which JSON allows
# unknown        no endpoint of `unknown` is known; a warning says so, without the id of the call
# unloads        the instance is unloaded after the first answer that concerns it
# busy           the template and the tokenizer wait until the instance generates nothing
SdkMode = Literal[
    "fine",
    "no_upgrade",
    "error_200",
    "no_handshake",
    "refused_key",
    "mute",
    "silent",
    "late",
    "closes",
    "garbage",
    "wrong_shape",
    "huge",
    "unknown",
    "unloads",
    "busy",
]
SDK_MODES: tuple[SdkMode, ...] = get_args(SdkMode)


@dataclass(eq=False, kw_only=True)
class SdkCall:
    """One message of a client; `endpoint` is "" for what has none, such as keepAlive.

    `outcome` is "running" until it is known, "none" for a call that is never answered, "warning" for one that the
    server cannot read. Times are `time.monotonic()` seconds.
    """

    kind: str
    endpoint: str
    parameter: object
    socket: SdkSocket
    asked_s: float
    outcome: Literal["running", "result", "error", "warning", "none"] = "running"
    answered_s: float | None = None
    is_fault: bool = False


@dataclass(eq=False, kw_only=True)
class SdkSocket:
    """One connection, or an attempt at one; `namespace` is its path without the slash."""

    namespace: str
    headers: dict[str, str]
    opened_s: float
    client_identifier: str = ""
    client_passkey: str = ""
    is_accepted: bool = False
    closed_s: float | None = None


@dataclass(eq=False, kw_only=True)
class Sdk:
    """How the protocol behaves, and what was asked by it; settings may be changed while the simulator serves.

    `tokens_factor` and `extra_tokens` make its counts differ from the server's own `usage`; `unknown` are the
    endpoints that an older server does not have (all of them while it is empty), for the mode of that name.
    `after_call` is told of each call before its answer is sent.
    """

    mode: SdkMode = "fine"
    late_s: float = 3.0
    tokens_factor: float = 1.0
    extra_tokens: int = 0
    unknown: frozenset[str] = frozenset()
    overflow_policy: Literal["stopAtLimit", "truncateMiddle", "rollingWindow"] = "truncateMiddle"
    after_call: Callable[[SdkCall], None] | None = None
    sockets: list[SdkSocket] = field(default_factory=list, init=False)
    calls: list[SdkCall] = field(default_factory=list, init=False)

    def faults(self) -> list[SdkCall]:
        """Returns what a client that only counts must never ask: channels, signals, loading and unloading."""
        return [call for call in self.calls if call.is_fault]

    def open_sockets(self) -> list[SdkSocket]:
        """Returns the connections that were accepted and not closed since."""
        return [socket for socket in self.sockets if socket.is_accepted and socket.closed_s is None]

    def endpoints(self) -> list[str]:
        return [call.endpoint for call in self.calls if call.kind == "rpcCall"]

    def parameters(self, endpoint: str) -> list[JsonObject]:
        return [call.parameter for call in self.calls if call.endpoint == endpoint and isinstance(call.parameter, dict)]
