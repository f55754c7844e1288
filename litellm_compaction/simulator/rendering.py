"""Renders the prompt that a simulated model sees, in countable pieces, and cuts one that exceeds the window.

Messages and tools are rendered like Qwen3's ChatML template. A prompt that is too long is cut silently. Tokens are
those of a vocabulary that the caller gives, with Qwen's added ones.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import tiktoken

from litellm_compaction.simulator.messages import Image, JsonObject, Message

IMAGE_TOKENS = 1000
_FIRST_IMAGE_ID = 1_000_000

TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


class Segment(NamedTuple):
    """A piece of a prompt: template or content text, an image given by its digest, or `ids` of unknown text."""

    text: str
    is_image: bool = False
    ids: tuple[int, ...] = ()

    def tokens(self) -> array[int]:
        """The token ids; an image is a fixed number of ids that are its own."""
        if self.ids:
            return array("I", self.ids)
        if not self.is_image:
            return encode(self.text)
        return array("I", [_FIRST_IMAGE_ID + int(self.text[:6], 16)]) * IMAGE_TOKENS

    def count_tokens(self) -> int:
        return IMAGE_TOKENS if self.is_image else len(self.ids or encode(self.text))


class Block(NamedTuple):
    """One turn of the template; `text` is that of its messages, without template text."""

    role: str
    segments: tuple[Segment, ...]
    text: str

    def count_tokens(self) -> int:
        return sum(segment.count_tokens() for segment in self.segments)


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation, oldest block first; `opening` begins the answer."""

    blocks: tuple[Block, ...]
    opening: tuple[Segment, ...]

    def segments(self) -> tuple[Segment, ...]:
        return tuple(segment for block in self.blocks for segment in block.segments) + self.opening

    def count_tokens(self) -> int:
        """The number of tokens, unscaled."""
        return sum(segment.count_tokens() for segment in self.segments())

    def text(self) -> str:
        """The messages' texts of the prompt, joined by newlines."""
        return "\n".join(block.text for block in self.blocks if block.text)


def render_chat(messages: Sequence[Message], tools: Sequence[JsonObject]) -> Prompt:
    """The prompt of a conversation; a final assistant message is continued instead of closed (bt#2041)."""
    blocks: list[Block] = []
    head = messages[0] if tools and messages[0].role == "system" else None
    start = 0 if head is None else 1
    if tools:
        blocks.append(_block("system", (*_content(head), _tools_segment(tools, after_text=head is not None)), head))
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    opening: tuple[Segment, ...] = (_header("assistant"),)
    for role, turn in itertools.groupby(enumerate(messages[start:], start), key=lambda item: item[1].role):
        if role == "tool":
            blocks.append(_tool_results([message for _, message in turn]))
            continue
        for position, message in turn:
            if role == "assistant" and position == len(messages) - 1:
                opening += _assistant(message, keep_reasoning=True)
            elif role == "assistant":
                blocks.append(_block(role, _assistant(message, keep_reasoning=position > last_user), message))
            else:
                blocks.append(_block(role, _content(message), message))
    return Prompt(tuple(blocks), opening)


def render_text(text: str, ids: tuple[int, ...] = ()) -> Prompt:
    return Prompt((Block("user", (Segment(text, ids=ids),), text),), ())


def answer_segments(reasoning: str, content: str, calls: Iterable[tuple[str, str]]) -> tuple[Segment, ...]:
    """The answer in the KV cache, in the pieces in which a later prompt repeats it."""
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return tuple(Segment(text) for text in (thought, content, tool_calls_text(calls, bool(content))) if text)


def tool_calls_text(calls: Iterable[tuple[str, str]], after_text: bool) -> str:
    """The calls (name, JSON arguments) as Qwen3 writes them."""
    texts = [f"{call_opening(name)}{normal_json(arguments)}}}\n</tool_call>" for name, arguments in calls]
    return ("\n" if after_text and texts else "") + "\n".join(texts)


def call_opening(name: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def normal_json(text: str) -> str:
    """The JSON text as a template's `tojson` writes it; text that is not JSON is kept."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except ValueError:
        return text


def _header(role: str) -> Segment:
    return Segment(f"<|im_start|>{role}\n")


def _block(role: str, body: Sequence[Segment], message: Message | None) -> Block:
    said = [message.text, *(call.arguments for call in message.tool_calls)] if message else []
    return Block(role, (_header(role), *body, Segment("<|im_end|>\n")), "\n".join(text for text in said if text))


def _content(message: Message | None) -> tuple[Segment, ...]:
    parts = () if message is None else message.parts
    if message is not None and all(isinstance(part, str) for part in parts):
        parts = (message.text,) if message.text else ()
    return tuple(Segment(part.digest, is_image=True) if isinstance(part, Image) else Segment(part) for part in parts)


def _assistant(message: Message, *, keep_reasoning: bool) -> tuple[Segment, ...]:
    reasoning, content = message.reasoning, message.text
    if not keep_reasoning:
        # Qwen3's template drops the thoughts of all answers before the last user message.
        reasoning, (_, end, rest) = "", content.rpartition("</think>")
        content = rest.lstrip("\n") if end else content
    return answer_segments(reasoning, content, [(call.name, call.arguments) for call in message.tool_calls])


def _tools_segment(tools: Sequence[JsonObject], *, after_text: bool) -> Segment:
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return Segment(("\n\n" if after_text else "") + TOOLS_BEFORE + lines + TOOLS_AFTER)


def _tool_results(messages: Sequence[Message]) -> Block:
    segments: list[Segment] = [Segment("<|im_start|>user")]
    for message in messages:
        segments += [Segment("\n<tool_response>\n"), *_content(message), Segment("\n</tool_response>")]
    segments.append(Segment("<|im_end|>\n"))
    return Block("tool", tuple(segments), "\n".join(message.text for message in messages))


# A truncated prompt leaves this share of the window for the answer (simplification; LM Studio's share is not known).
_ANSWER_SHARE = 8


def with_newest(prompt: Prompt, window_tokens: int, head: tuple[Block, ...] = (), factor: float = 1.0) -> Prompt:
    """`head` and the newest messages that fit, if each token counts as `factor`; the very newest loses its front.

    Without a head the oldest messages are dropped first, the system message among them: a rolling window.
    """
    fixed = math.ceil(Prompt(head, prompt.opening).count_tokens() * factor)
    room_tokens = int((max(window_tokens - window_tokens // _ANSWER_SHARE, fixed + 1) - fixed) / factor)
    blocks: list[Block] = []
    for block in reversed(prompt.blocks[len(head) :]):
        size = block.count_tokens()
        if size > room_tokens:
            if not blocks:
                blocks.append(_end_of(block, room_tokens))
            break
        blocks.append(block)
        room_tokens -= size
    return Prompt((*head, *reversed(blocks)), prompt.opening)


def _end_of(block: Block, limit_tokens: int) -> Block:
    *body, closing = block.segments[1:]
    room_tokens = max(0, limit_tokens - closing.count_tokens())
    tokens = [token for segment in body if not segment.is_image for token in segment.tokens()]
    text = decode(array("I", tokens[max(len(tokens) - room_tokens, 0) :]))
    # A cut inside a character or before a space can add a token, so the front gives way until it fits.
    while text and count(text) > room_tokens:
        text = text[max(1, len(text) // 100) :]
    return Block(block.role, (Segment(text), closing), text)


# One token each in the Qwen models; as plain text they would be several (llama.cpp vocabulary of Qwen3).
_TAGS = ("tool_call", "tool_response", "think")
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", *(f"<{sign}{tag}>" for tag in _TAGS for sign in ("", "/")))
_FIRST_SPECIAL_ID = 300_000
_SPECIAL_IDS = {text: _FIRST_SPECIAL_ID + offset for offset, text in enumerate(SPECIAL_TOKENS)}
_SPECIAL_PATTERN = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL_TOKENS) + ")")

# See `count_by`.
_load: Callable[[], tiktoken.Encoding | None] | None = None

# tiktoken 0.14 panics on 1,000,000 equal characters and passes 800,000, so long runs are split.
_SLICE_CHARS = 100_000
_CACHED_TEXTS = 16_384


def count(text: str) -> int:
    return len(encode(text))


def token_bytes(token_id: int) -> bytes:
    if token_id >= _FIRST_SPECIAL_ID:
        return SPECIAL_TOKENS[token_id - _FIRST_SPECIAL_ID].encode()
    return bytes(load_vocabulary().decode_single_token_bytes(token_id))


def decode(token_ids: array[int]) -> str:
    """The text of `token_ids`; a character cut at either end is replaced."""
    return b"".join(token_bytes(token_id) for token_id in token_ids).decode("utf-8", errors="replace")


@lru_cache(maxsize=_CACHED_TEXTS)
def encode(text: str) -> array[int]:
    """Returns the token ids of `text`, special tokens included; the array is shared and must not be changed."""
    token_ids: array[int] = array("I")
    for piece in _SPECIAL_PATTERN.split(text):
        if piece in _SPECIAL_IDS:
            token_ids.append(_SPECIAL_IDS[piece])
            continue
        for start in range(0, len(piece), _SLICE_CHARS):
            token_ids.extend(load_vocabulary().encode_ordinary(piece[start : start + _SLICE_CHARS]))
    return token_ids


def count_by(load: Callable[[], tiktoken.Encoding | None]) -> None:
    """Has all simulators of this process take the vocabulary that `load` gives; call it before any runs."""
    global _load
    _load = load


@lru_cache(maxsize=1)
def load_vocabulary() -> tiktoken.Encoding:
    """Returns the vocabulary that `count_by` was told."""
    if _load is None or (found := _load()) is None:
        raise RuntimeError("no vocabulary: call count_by first")
    return found
