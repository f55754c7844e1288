"""In which pieces an answer is generated: reasoning, text, and tool calls, cut into deltas of a few tokens.

Pure: a reply and limits in, pieces out. Time, faults, and the network are the business of `generation`.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from .rendering import call_opening
from .script import Reply
from .vocabulary import count, encode, token_bytes

ReasoningField = Literal["reasoning_content", "reasoning", "think"]
PieceKind = Literal["reasoning", "content", "tool_start", "tool_arguments", "hidden"]


class Piece(NamedTuple):
    """A delta and its cost in tokens; `hidden` tokens are generated but never shown (the frame of a call)."""

    kind: PieceKind
    text: str
    tokens: int
    call_index: int = 0
    call_id: str = ""


class _Run(NamedTuple):
    kind: PieceKind
    token_ids: array[int]
    call_index: int = 0
    name: str = ""


def visible_reply(reply: Reply, stops: tuple[str, ...], reasoning_field: ReasoningField) -> Reply:
    """The reply as its text comes out: cut at the first stop string, thoughts inline where so configured."""
    ends = [end for stop in stops if (end := reply.content.find(stop)) >= 0]
    if ends:
        reply = replace(reply, content=reply.content[: min(ends)], tool_calls=())
    if reply.reasoning and reasoning_field == "think":
        reply = replace(reply, content=f"<think>\n{reply.reasoning}\n</think>\n\n{reply.content}", reasoning="")
    return reply


def reply_tokens(reply: Reply) -> int:
    """The tokens of the whole reply, unscaled."""
    return sum(len(run.token_ids) for run in _runs(reply))


def reasoning_tokens(reply: Reply) -> int:
    """The tokens of its reasoning, unscaled."""
    return count(reply.reasoning)


def pieces(reply: Reply, chunk_tokens: int, limit_tokens: int, new_call_id: Callable[[], str]) -> Iterator[Piece]:
    """The deltas of `reply`, `chunk_tokens` each, ending after `limit_tokens` tokens (unscaled)."""
    remaining = limit_tokens
    call_ids: dict[int, str] = {}
    for run in _runs(reply):
        if run.kind == "tool_start":
            size = len(run.token_ids)
            if size > remaining:
                yield Piece("hidden", "", remaining)
                return
            call_ids[run.call_index] = new_call_id()
            yield Piece("tool_start", run.name, size, run.call_index, call_ids[run.call_index])
            remaining -= size
            continue
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        position = 0
        while position < len(run.token_ids):
            if remaining == 0:
                return
            step = run.token_ids[position : position + min(chunk_tokens, remaining)]
            position += len(step)
            remaining -= len(step)
            text = decoder.decode(b"".join(map(token_bytes, step)), final=position == len(run.token_ids))
            kind = run.kind if text else "hidden"
            yield Piece(kind, text, len(step), run.call_index, call_ids.get(run.call_index, ""))


def _runs(reply: Reply) -> Iterator[_Run]:
    if reply.reasoning:
        yield _Run("reasoning", encode(reply.reasoning))
    if reply.content:
        yield _Run("content", encode(reply.content))
    for index, (name, arguments) in enumerate(reply.tool_calls):
        yield _Run("tool_start", encode(call_opening(name)), index, name)
        if arguments:
            yield _Run("tool_arguments", encode(arguments), index)
