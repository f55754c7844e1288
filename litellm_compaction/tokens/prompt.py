"""Our own count of a request: its rendered prompt if the template is this package's, else vocabulary and constants.

Images, sound and pages are estimated by their size: vision models pay by area (Qwen-VL, Pixtral) or a fixed price, and
inline images show it in their headers. What a server made of that is in `known.py`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from math import ceil, fsum
from threading import Lock
from typing import Literal, NamedTuple

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.templates import TemplateRefusal, shape, template
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import vocabulary
from litellm_compaction.tokens.estimate import Own

# A rendered prompt is counted in parts. A text takes its share of the part that shows it, one of the next so many; what
# none shows as it is counts by so much of it.
_NEXT_PARTS, _WEIGHED_SHARE = 8, 0.125
# Longer strings without any space are data, as base64 is.
_DATA_CHARS = 2048
# An end for documents made to be slow.
_MAX_VALUES = 100_000
# Texts are remembered in about 200 bytes each.
_MAX_ENTRIES = 65_536
# A part of a text is as many pieces from all over it; fewer characters say too little of the rest.
_PIECES, _LEAST_CHARS = 8, 64
# Enough for a JPEG with a large EXIF block before its frame header.
_HEADER_CHARS = 131_072
_LEAST_IMAGE_TOKENS, _CHARS_PER_TOKEN = 64, 8
# An image of the web may be of any size; usual ones are a million pixels, 1,000 to 1,300 tokens of 28 pixels a side.
_REMOTE_TOKENS = 1024
# Sound by published frame rates, not measured: Qwen2-Audio 25 tokens a second, Voxtral 12.5, Gemma 3n 6.25. Plain sound
# is 16 kHz mono, which models hear; what is recorded better is longer in bytes. Speech is not packed below 16 kbit/s.
_WAV_BYTES_PER_TOKEN, _PACKED_BYTES_PER_TOKEN = 1280, 80
# Parts that a model sees as images, sound or pages: their data is never text.
_TYPES = frozenset(
    "image_url image input_image image_file input_audio audio video_url video file input_file".split()  # noqa: SIM905
)
# Width and height in a header, and their order of bytes.
_SIZES: tuple[tuple[re.Pattern[bytes], Literal["big", "little"]], ...] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n.{8}(.{4})(.{4})", re.DOTALL), "big"),
    (re.compile(rb"GIF8[79]a(..)(..)", re.DOTALL), "little"),
    (re.compile(rb"RIFF.{4}WEBPVP8 .{10}(..)(..)", re.DOTALL), "little"),
    (re.compile(rb"RIFF.{4}WEBPVP8X.{8}(...)(...)", re.DOTALL), "little"),
    # Behind segments, each of which says its length.
    (re.compile(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]...(..)(..)", re.DOTALL), "big"),
)


@dataclass(frozen=True, slots=True)
class TextCounts:
    """Remembers the tokens of texts by length and hash, never by the text; may be used from several threads."""

    _asker: str = ""
    _entries: Bounded[tuple[int, int], int] = field(default_factory=lambda: Bounded(_MAX_ENTRIES))
    _lock: Lock = field(default_factory=Lock)

    def of(self, asker: str) -> TextCounts:
        """The same memory and bound for another tenant, who finds only their own entries."""
        return TextCounts(asker, self._entries, self._lock)

    def lengths(
        self, family: Family, texts: Sequence[str], *, share: float = 1.0, in_prompt: bool = False
    ) -> list[float]:
        """The tokens of each text by itself or after a special token, by a `share` of it: about 0.1 s per new MB."""
        if not texts:
            return []
        samples = {text: _sample(text, share) for text in texts}
        # The interpreter's own hashes: 64 bit, seeded for this process, and kept in each string, so that a request that
        # is counted twice is read once. Another tenant's are other ones.
        own = hash((self._asker, family.vocabulary, family.single_digits, in_prompt))
        keys = {sample: (len(sample), hash((own, sample))) for sample in samples.values()}
        with self._lock:
            lengths = {sample: self._entries[key] for sample, key in keys.items() if key in self._entries}
            for sample in lengths:
                self._entries.move_to_end(keys[sample])
        new = [sample for sample in keys if sample not in lengths]
        words = vocabulary(family.vocabulary)
        counted = words.lengths_in_prompt(new) if in_prompt else words.lengths(new)
        for sample, tokens in zip(new, counted, strict=True):
            # cl100k, which stands in, takes three digits at once.
            lengths[sample] = tokens + (2 * sum(map(sample.count, "0123456789")) // 3 if family.single_digits else 0)
        with self._lock:
            self._entries.update((keys[sample], lengths[sample]) for sample in new)
        return [lengths[samples[text]] * len(text) / max(1, len(samples[text])) for text in texts]


def _sample(text: str, share: float) -> str:
    """A text, or equal pieces from all over it that are together such a share of it; of a short one its beginning."""
    chars = max(ceil(share * len(text)), _LEAST_CHARS)
    if chars >= len(text):
        return text
    pieces = min(_PIECES, chars // _LEAST_CHARS)
    step = len(text) // pieces
    return "".join(text[start : start + chars // pieces] for start in range(0, step * pieces, step))


class Prompt(NamedTuple):
    """A rendered request; `is_faithful` if no engine would refuse what it was rendered from."""

    text: str
    is_faithful: bool


def own_count(family: Family, request: Request, texts: TextCounts, *, share: float) -> Own:
    """Our own count of a request, by a `share` of each text that stands for all of it: 0.1 s per new MB."""
    messages, costs = request.messages, family.costs
    prompt = render(family, messages, request.tools) if share == 1 else None
    shows_tools = prompt is not None and "renders_tools" in template(family.template).traits
    last_user = max((at for at, message in enumerate(messages) if message.role == "user"), default=0)
    parts = [] if prompt is None else vocabulary(family.vocabulary).split(prompt.text)
    counted = texts.lengths(family, parts[::2], in_prompt=True)
    shown = None if prompt is None else _shown([message.text for message in messages], parts[::2], counted)
    weights = [_weighed(each, family, texts, share, shown, is_old=at < last_user) for at, each in enumerate(messages)]
    extras_tokens = fsum(texts.lengths(family, [_as_json(request.extras)] if request.extras else [], share=share))
    schemas = texts.lengths(family, list(map(_as_json, request.tools)), share=share)
    tools_tokens = costs.tools + fsum(costs.tool + tokens for tokens in schemas) if schemas else 0.0
    optional_tokens = extras_tokens + fsum(each.optional for each in weights)
    # OpenAI's models have no template that could leave tools out.
    optional_tokens += 0.0 if shows_tools or family.name == "gpt" else tools_tokens
    factor, system_tokens = 1.0, 0
    if prompt is not None:
        # Divided as the constants divide theirs.
        shares = fsum(each.shown for each in weights) + costs.request + (tools_tokens if shows_tools else 0.0)
        factor = (fsum(counted) + len(parts) // 2) / max(1.0, shares)
    elif not messages or not messages[0].is_system:
        system_tokens = family.default_system_tokens
    media, is_bare = tuple(each.media for each in weights), not any(each.beside or each.media for each in weights)
    is_known = prompt.is_faithful if prompt is not None else not family.template
    return Own(
        sizes=tuple(each.shown * factor + each.beside + each.media for each in weights),
        tools_tokens=tools_tokens * (factor if shows_tools else 1.0),
        overhead_tokens=costs.request * factor + extras_tokens + system_tokens,
        optional_tokens=optional_tokens + system_tokens,
        media=media if any(media) else (),
        images=sum(each.images for each in weights),
        rendered=prompt is not None,
        exact=family.exact and is_known and is_bare and not optional_tokens and not system_tokens,
        asks=bool(messages) and messages[-1].role == "user",
    )


def _shown(texts: Sequence[str], parts: Sequence[str], counted: Sequence[float]) -> dict[str, float]:
    """The tokens of the texts that are found in the parts of a rendered prompt, in order."""
    tokens, first = dict[str, float](), 0
    for text in texts:
        bare = text.strip()
        at = next((at for at in range(first, min(first + _NEXT_PARTS, len(parts))) if bare in parts[at]), None)
        if bare and at is not None:
            tokens[text], first = counted[at] * len(text) / len(parts[at]), at
    return tokens


class _Weight(NamedTuple):
    """The tokens of a message: shown by templates, what of it is optional (`Own`), of strings beside it, of media."""

    shown: float
    optional: float
    beside: float
    media: float
    images: int


def _weighed(
    message: Message,
    family: Family,
    texts: TextCounts,
    share: float,
    shown: Mapping[str, float] | None,
    *,
    is_old: bool,
) -> _Weight:
    """The weight of a message; reasoning before the person's newest word is left out by most templates."""
    thought, name = "" if shown is not None and is_old else message.reasoning, message.raw.get("name")
    group = [thought, message.text, *([name] if isinstance(name, str) else [])]
    group += [text for call in message.calls for text in (call.name, call.arguments)]
    lengths = shown or {}
    left = [text for text in group if text and text not in lengths]
    counted = texts.lengths(family, left, share=share if shown is None else _WEIGHED_SHARE)
    own = dict(zip(left, counted, strict=True))
    tokens = [own.get(text, lengths.get(text, 0.0)) for text in group]
    optional = tokens[0] if is_old else 0.0
    if not family.owns_vocabulary:
        optional += fsum(map(_of_other_scripts, group, tokens))
    odd: list[JsonValue] = [message.raw.get("function_call")]
    media: list[int] = []
    content = message.raw.get("content")
    for part in content if message.other_parts and isinstance(content, list) else ():
        if is_media(part):
            media.append(image_tokens(part, limit_tokens=family.image_tokens, patch_px=family.image_patch_px))
        elif not isinstance(part, str) and not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            odd.append(part)
    beside = list(islice(strings(odd), _MAX_VALUES))
    return _Weight(
        shown=family.costs.message + len(message.calls) * family.costs.call + fsum(tokens),
        optional=optional,
        beside=fsum(texts.lengths(family, beside, share=share)),
        media=float(sum(media)),
        images=len(media),
    )


def _of_other_scripts(text: str, tokens: float) -> float:
    """Half of the tokens that are of characters beyond ASCII, of which each takes about three times as many."""
    others = 0 if text.isascii() else len(text) - len(text.encode("ascii", "ignore"))
    return tokens * 1.5 * others / (2 * others + len(text)) if others else 0.0


def _as_json(value: JsonValue) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        return "\n".join(strings(value))


def strings(value: JsonValue) -> Iterator[str]:
    """Every key, string and number inside a JSON value, without data URIs and base64; for any depth."""
    open_values: list[JsonValue] = [value]
    while open_values:
        current = open_values.pop()
        if isinstance(current, str):
            is_long = len(current) > _DATA_CHARS and current.isascii()
            if not current.startswith("data:") and not (is_long and len(current[:_DATA_CHARS].split()) == 1):
                yield current
        elif isinstance(current, Mapping):
            open_values += current.values()
            yield from map(str, current)
        elif isinstance(current, Sequence):
            open_values += current
        elif current is not None:
            yield str(current)


def render(
    family: Family, messages: Sequence[Message], tools: Sequence[JsonValue], now: datetime | None = None
) -> Prompt | None:
    """The prompt, without tools if the template drops them; None if the family has none, or it refuses the request."""
    if not family.template:
        return None
    chosen, words = template(family.template), vocabulary(family.vocabulary)
    if "renders_calls" not in chosen.traits and any(message.calls or message.role == "tool" for message in messages):
        # A server shows them in a way of its own, so that leaving them out would count too little.
        return None
    shaped, is_faithful = shape(messages, chosen)
    try:
        text = chosen.render(shaped, tools, bos=words.bos, eos=words.eos, now=now)
    except TemplateRefusal:
        return None
    if not text.startswith(words.bos):
        # The engine adds it to every prompt, and has taken it off the rendered one before (common/chat.cpp).
        text = words.bos + text
    return Prompt(text, is_faithful)


def is_media(part: JsonValue) -> bool:
    return isinstance(part, Mapping) and str(part.get("type")) in _TYPES and not isinstance(part.get("text"), str)


def image_tokens(part: JsonValue, *, limit_tokens: int, patch_px: int) -> int:
    """Tokens of one part that is not text: by area or length if that is known, else the family's upper limit.

    One token sees a square of `patch_px` pixels a side; 0 if every image costs the limit.
    """
    fields = part if isinstance(part, Mapping) else {}
    sound, source = fields.get("input_audio"), fields.get("image_url")
    if isinstance(sound, Mapping):
        data, is_plain = sound.get("data"), sound.get("format") == "wav"
        data_bytes = len(data) * 3 // 4 if isinstance(data, str) else 0
        return max(limit_tokens, data_bytes // (_WAV_BYTES_PER_TOKEN if is_plain else _PACKED_BYTES_PER_TOKEN))
    url = source.get("url") if isinstance(source, Mapping) else source
    if not patch_px or not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
        return limit_tokens
    if not url.startswith("data:"):
        return min(_REMOTE_TOKENS, limit_tokens)
    width, height = inline_size(url)
    # A separator for each row, begin and end markers. No format pays more than a token for eight bytes of its own.
    columns, rows = ceil(width / patch_px), ceil(height / patch_px)
    tokens = columns * rows + rows + 8 if width and height else _LEAST_IMAGE_TOKENS + len(url) // _CHARS_PER_TOKEN
    return min(max(tokens, _LEAST_IMAGE_TOKENS), limit_tokens)


def inline_size(url: str) -> tuple[int, int]:
    """Width and height of an inline image (a `data:` URL) in pixels; 0 if its header says nothing."""
    data = url[:_HEADER_CHARS].partition(";base64,")[2]
    try:
        header = base64.b64decode(data[: len(data) // 4 * 4])
    except ValueError:
        return 0, 0
    start = 2 if header.startswith(b"\xff\xd8") else 0
    while start and header[start : start + 1] == b"\xff" and not _SIZES[-1][0].match(header, start):
        start += 2 + int.from_bytes(header[start + 2 : start + 4], "big")
    for pattern, order in _SIZES[-1:] if start else _SIZES[:-1]:
        if found := pattern.match(header, start):
            one, other = (int.from_bytes(number, order) for number in found.groups())
            return (other, one) if start else (one, other)
    return 0, 0
