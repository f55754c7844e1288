"""Keeps the fill of the context, turn by turn, for the page's plots.

A turn is one line of a log in the store, written when the server has counted its answer. Its conversation is known by a
hash of its beginning, keyed with the proxy's own secret (promise P9).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from litellm_compaction.core.messages import Message, system_prefix_length
from litellm_compaction.engine import Action, PreparedRequest, RequestContext

# Enough to tell conversations apart, little enough to hash on the event loop.
_OPENING_CHARS = 2048
_MOST_PROGRAM_CHARS = 40
_Tokens: TypeAlias = Annotated[int, Field(ge=0, le=1_000_000_000)]
_Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]


class Turn(TypedDict):
    """One client request.

    `before_tokens` is the prompt as it came, `prompt_tokens` as it was sent, `filled_tokens` with its answer. Above the
    ratios a prompt with room for its answer is compacted, and an answer carried over. `messages` are without the
    leading system ones; `restarts` of the answer are the context before and after, in tokens.
    """

    talk: str
    model: str
    tenant: str
    program: str
    when_s: _Number
    messages: int
    before_tokens: _Tokens
    prompt_tokens: _Tokens
    filled_tokens: _Tokens
    window_tokens: _Tokens
    compact_ratio: _Number
    carry_ratio: _Number
    action: Action
    restarts: list[tuple[_Tokens, _Tokens]]


_ADAPTER = TypeAdapter(Turn)


def conversations_of(lines: Iterable[str], tenant: str = "") -> list[dict[str, Any]]:
    """Returns the conversations in lines of the log as JSON, the most recent first, each with its turns, oldest first.

    A turn with fewer messages than the one before it begins another conversation that opens alike. Of several lines
    for one turn, which it has after a restart, the last one counts. Lines that this version cannot read are left out.

    Args:
        tenant: whose conversations; "" for all.
    """
    talks: dict[str, list[Turn]] = {}
    for turn in sorted(filter(None, map(_turn_of, lines)), key=lambda turn: turn["when_s"]):
        if tenant not in ("", turn["tenant"]):
            continue
        turns = talks.setdefault(turn["talk"], [])
        if turns and turn["messages"] < turns[-1]["messages"]:
            turns.clear()
        if turns and turn["when_s"] == turns[-1]["when_s"]:
            turns.pop()
        turns.append(turn)
    newest_first = sorted(talks.items(), key=lambda talk: (-talk[1][-1]["when_s"], talk[0]))
    return [
        {"id": name, "turns": [{key: item for key, item in turn.items() if key != "tenant"} for turn in turns]}
        for name, turns in newest_first
    ]


def _turn_of(line: str) -> Turn | None:
    try:
        return _ADAPTER.validate_python(json.loads(line))
    except (ValueError, RecursionError):
        return None


class Turns:
    """Writes down the turns of this process.

    Args:
        write: keeps a line with its time, without waiting for it.
        secret: gives the one that all workers have; without one (None) each names conversations its own way.
    """

    def __init__(self, write: Callable[[float, str], None], *, secret: Callable[[], str | None]) -> None:
        self._write = write
        self._secret = secret
        self._own_secret = secrets.token_hex(16)

    def sent(
        self,
        turn: Turn | None,
        messages: Sequence[Message],
        context: RequestContext,
        prepared: PreparedRequest,
        program: str = "",
    ) -> Turn | None:
        """Notes the prepared request; returns the turn that it belongs to, None if it has no messages.

        Args:
            turn: of the same request, if something went out for it before.
            messages: as the client sent them.
            program: the client's, by its own word: `OpenAI/Python`; "" if it says none.
        """
        tokens, window_tokens = prepared.count.tokens, prepared.window.tokens
        if turn is None:
            rest = messages[system_prefix_length(messages) :]
            if not rest:
                return None
            turn = {
                "talk": self._name(rest[0], context),
                "model": context.label,
                "tenant": context.tenant,
                "program": program[:_MOST_PROGRAM_CHARS],
                "when_s": time.time(),
                "messages": len(rest),
                "before_tokens": prepared.tokens_before,
                "prompt_tokens": tokens,
                "filled_tokens": tokens,
                "window_tokens": window_tokens,
                "compact_ratio": prepared.budget.line_tokens / window_tokens,
                "carry_ratio": context.settings.streaming_ratio,
                "action": "none",
                "restarts": [],
            }
        if prepared.messages and prepared.messages[-1].is_synthetic:
            # Servers report no usage of a stopped answer, and `tokens_before` is the client's whole conversation: where
            # that is larger than the window, only the limit at which answers are stopped is certain.
            limit = int(context.settings.streaming_ratio * window_tokens)
            stopped_at = prepared.tokens_before if prepared.tokens_before <= window_tokens else limit
            turn["restarts"].append((max(turn["filled_tokens"], stopped_at), tokens))
        elif prepared.action == "compacted" or turn["action"] == "none":
            turn["action"] = prepared.action
        turn.update({"window_tokens": window_tokens, "prompt_tokens": tokens, "filled_tokens": tokens})
        return turn

    def answered(self, turn: Turn | None, prompt_tokens: int, completion_tokens: int) -> None:
        """Writes the turn with the numbers of an answer's usage."""
        if turn is not None and prompt_tokens > 0:
            turn.update({"prompt_tokens": prompt_tokens, "filled_tokens": prompt_tokens + max(completion_tokens, 0)})
            self._write(turn["when_s"], json.dumps(turn, separators=(",", ":")))

    def _name(self, first: Message, context: RequestContext) -> str:
        opening = repr((context.tenant, context.label, first.role, len(first.text), first.text[:_OPENING_CHARS]))
        secret = self._secret() or self._own_secret
        key = hashlib.blake2b(b"litellm_compaction turns " + secret.encode(), digest_size=32).digest()
        return hashlib.blake2b(opening.encode(errors="replace"), key=key, digest_size=8).hexdigest()
