"""Counts requests, message by message, with the margin of error; learns from servers' own counts; counts a stream.

`ToldCounts` holds each count of LM Studio's protocol against the answer to the same request. Both are equal or a
constant apart, which is learned; else the answers' numbers count for an hour. Images are not in them and cost what such
images have cost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

from litellm_compaction.concurrency import Bounded, Rests
from litellm_compaction.core.messages import JsonObject, Request, system_prefix_length
from litellm_compaction.templates.template import chars_of
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import usable, usable_soon
from litellm_compaction.tokens.calibration import (
    MAX_RATIO,
    MIN_TRUNCATED_TOKENS,
    TINY_TOKENS,
    Calibration,
    Calibrations,
    is_between_plausible,
    is_plausible,
    joined,
)
from litellm_compaction.tokens.count import (
    Anchor,
    Count,
    Deviation,
    Fingerprints,
    RawCount,
    least_ratio_of,
    solid_tokens,
)
from litellm_compaction.tokens.formula import Measure, Written, mix_of, raw_tokens
from litellm_compaction.tokens.media import MOST_FIXED_TOKENS, MediaPrices
from litellm_compaction.tokens.prefix import Anchored, Anchors, fingerprints
from litellm_compaction.tokens.rendered import Counting
from litellm_compaction.tokens.samples import Stamps

__all__ = ["Count", "Deviation", "GeneratedTokens", "TokenCounter", "joined"]

# Wildcard deployments get their model names from clients, so the number of calibrations needs an end.
_MAX_TARGETS = 4096
# Hashes of more text than this are made outside the event loop's thread.
_THREAD_CHARS = 1_000_000
_EXTRAS_THREAD_CHARS = 250_000
# Whole counts, of about 30 bytes per message.
_MAX_RECENT = 256
# The part of a prompt that a compaction may leave.
_COMPACTED_RATIO = 0.25
# A longer text by itself is estimated by pieces of it, which take 10 to 20 ms.
_EXACT_TEXT_CHARS = 262_144
_PIECES, _PIECE_CHARS = 8, 16_384
_WITH_TOOLS = "|tools"
# A number below this share of our count may be that of a cut prompt. At 0.9 a server that counts as we do is never
# asked for its window again.
_WHOLE_RATIO = 0.9
# Of what no template leaves out, so much is the least that any vocabulary makes: of digits and other scripts.
_LEAST_EXACT_RATIO = 0.15
# With more images than this a number says little of the text beside them.
_MOST_MEDIA_RATIO = 1 / 3
# A running answer is counted by so many characters: an encoding of everything again would be quadratic, and a count of
# chunks wrong by up to 75 % if several tokens come in one.
_SETTLED_CHARS = 256
# Between two counts: what the last pieces took, and never less than English takes.
_CHARS_PER_TOKEN = 4.0


class TokenCounter:
    """Counts for any number of deployments, and remembers their servers' numbers.

    Args:
        wall_clock: seconds since 1970; of several processes' lessons the newest counts.

    Attributes:
        told: the counts of LM Studio's protocol.
    """

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._stamps = Stamps(wall_clock)
        self._counting = Counting()
        self._anchors = Anchors()
        self._recent: Bounded[tuple[Family, int], RawCount] = Bounded(_MAX_RECENT)
        self._calibrations: Bounded[str, Calibrations] = Bounded(_MAX_TARGETS)
        self.told = ToldCounts(lambda target_key: self._of(target_key).media)

    async def count(self, target_key: str, family: Family, request: Request, *, asker: str = "") -> Count:
        """The tokens of a request. Raises on nothing in its messages and tools.

        Args:
            target_key: the deployment, whose server's numbers are used.
            family: of its model.
            request: to be sent.
            asker: the tenant (`Target.asker`); what was remembered of another's requests is not used.

        Raises:
            RecursionError: its extras are nested deeper than JSON is written.
        """
        family = await usable_soon(family)
        prints = await _fingerprints(request, asker)
        counting = self._counting.of(asker)
        raw = await self._raw(counting, family, request, prints)
        extras_tokens = await _extras_tokens(counting, family, request.extras) if request.extras else 0.0
        if extras_tokens:
            raw = raw.with_extras(extras_tokens)
        counting_method = _counting_method(family, rendered=raw.rendered)
        calibrations = self._of(target_key)
        if raw.rendered and raw.doubtful_tools_tokens:
            ratio = calibrations.of(counting_method).tools_ratio
            if ratio is None:
                # Numbers of prompts with tools of unknown price say nothing about those without.
                counting_method += _WITH_TOOLS
            else:
                raw = raw.with_tools_priced(ratio, exact=family.exact and raw.allowance_tokens == 0)
        prediction = calibrations.of(counting_method).predict(raw.text_tokens, raw.mix, raw.error_ratio)
        # Of a shorter prompt more samples hold, and the one that says most counts.
        shorter = calibrations.of(counting_method).predict(raw.text_tokens * _COMPACTED_RATIO, raw.mix, raw.error_ratio)
        text_factor = max(prediction.factor, shorter.factor)
        role = request.messages[-1].role if request.messages else ""
        anchor = self._anchors.find(target_key, counting_method, prints)
        anchored = Anchored(calibrations, counting_method)
        reading = anchored.read(raw, prediction, anchor) if anchor else None
        if anchor is not None and reading is not None and raw.profile is not None and anchor.role != role:
            like = self._anchors.find(target_key, counting_method, prints, role=role)
            prefix_tokens = sum(raw.sizes[: system_prefix_length(request.messages)]) if role == "user" else 0.0
            missing_tokens = prefix_tokens * max(1.0, prediction.factor)
            anchor, reading = anchored.read_like_end(raw, (anchor, reading), like, missing_tokens)
        if reading is None:
            reading = anchored.read_alone(raw, prediction)
            factor = reading.factor
            sizes = tuple(map(ceil, raw.sizes_by(factor, reading.media_factor)))
            tools_tokens = ceil(raw.tools_tokens * factor)
            overhead_tokens = ceil(raw.overhead_tokens * factor)
        else:
            parts = raw.sizes_by(reading.factor, reading.media_factor)
            tools_tokens, *rounded = _rounded((raw.tools_tokens * reading.factor, *parts))
            sizes = tuple(rounded)
            overhead_tokens = max(0, ceil(reading.tokens) - tools_tokens - sum(sizes))
        error_ratio, text_error_ratio = reading.error_ratio, max(reading.error_ratio, prediction.error_ratio)
        if raw.left_out_tokens:
            factor = max(1.0, prediction.factor)
            new_tokens = max(0.0, raw.left_out_tokens - (anchor.left_out_tokens if anchor is not None else 0.0))
            error_ratio += new_tokens * factor / reading.tokens
            text_error_ratio += raw.left_out_tokens * factor / reading.tokens
        return Count(
            tokens=overhead_tokens + tools_tokens + sum(sizes),
            sizes=sizes,
            tools_tokens=tools_tokens,
            overhead_tokens=overhead_tokens,
            error_ratio=error_ratio,
            text_error_ratio=text_error_ratio,
            text_ratio=max(1.0, text_factor / max(reading.factor, 0.01)),
            exact=raw.exact and raw.allowance_tokens == 0,
            raw_tokens=raw.tokens,
            rendered=raw.rendered,
            media_tokens=raw.media_tokens,
            media_factor=reading.media_factor,
            images=(images := sum(len(message.other_parts) for message in request.messages) if raw.media else 0),
            media_doubt_tokens=_media_doubt(calibrations.media, raw, images, anchor),
            allowance_tokens=raw.allowance_tokens,
            extras_tokens=extras_tokens,
            doubtful_tools_tokens=raw.doubtful_tools_tokens,
            left_out_tokens=raw.left_out_tokens,
            mix=raw.mix,
            calibrated=prediction.calibrated,
            counting_method=counting_method,
            profile=raw.profile,
            role=role,
            prefix_tokens=sum(sizes[: system_prefix_length(request.messages)]) if raw.profile is not None else 0,
            prints=prints,
            anchor=anchor,
        )

    async def _raw(self, counting: Counting, family: Family, request: Request, prints: Fingerprints) -> RawCount:
        """Remembers whole counts, since two hooks count the same request."""
        if not prints:
            return await counting.count(family, request)
        key = (family, prints[-1])
        found = self._recent.pop(key, None)
        if found is None:
            found = await counting.count(family, request, prints)
        self._recent[key] = found
        return found

    async def prepare(self, family: Family) -> None:
        """Loads vocabulary and templates, so that no request is the first one: some calls hold the interpreter lock."""
        await usable_soon(family)

    async def count_text(self, target_key: str, family: Family, text: str) -> int:
        """Calibrated tokens of a text by itself, without any template around it."""
        family = await usable_soon(family)
        (measure,) = await self._counting.texts.get(family.vocabulary, [[Written(text)]])
        return self._text_tokens(target_key, family, measure)

    def text_counter(self, target_key: str, family: Family, *, asker: str = "") -> Callable[[str], int]:
        """`count_text` for pure callers: counts in the caller's thread, 0.03 s at most.

        Of a longer text eight pieces stand for all of it: whatever is sent is counted as a request before.
        """
        texts = self._counting.of(asker).texts

        def count_text_now(text: str) -> int:
            usual = usable(family)
            if len(text) > _EXACT_TEXT_CHARS:
                pieces = _pieces(text)
                counted = texts.get_now(usual.vocabulary, [[Written(piece)] for piece in pieces])
                tokens = sum(self._text_tokens(target_key, usual, measure) for measure in counted)
                return ceil(tokens * len(text) / sum(map(len, pieces)))
            (measure,) = texts.get_now(usual.vocabulary, [[Written(text)]])
            return self._text_tokens(target_key, usual, measure)

        return count_text_now

    def learn(self, target_key: str, count: Count, prompt_tokens: int) -> Deviation | None:
        """Learns from the server's number for the request that `count` belongs to.

        Not learned: no number (≤ 0), a ratio that no vocabulary explains, a prompt that was probably cut, and the first
        number that may leave out the part that the server had in its cache.

        Returns:
            A deviation if the number was refused, and the first time that an exact family is off by more than 5 %.
        """
        if prompt_tokens <= 0 or count.raw_tokens <= 0:
            return None
        self.told.compare(target_key, count, prompt_tokens)
        if count.extras_tokens:
            # A server may write extras into the prompt or not, and clients choose them: no measure of text.
            return None
        deviation = Deviation(
            expected=round(count.raw_tokens), actual=prompt_tokens, ratio=prompt_tokens / count.raw_tokens
        )
        calibrations = self._of(target_key)
        if self.is_suspicious(count, prompt_tokens):
            if not self.explains(target_key, count, prompt_tokens):
                return deviation
        else:
            calibration, anchored = (
                calibrations.of(count.counting_method),
                Anchored(calibrations, count.counting_method),
            )
            if not calibration.believes(prompt_tokens, anchored.least_tokens(count)):
                return None
            if not _has_added(calibration, count, prompt_tokens):
                return deviation
            anchored.learn(count, prompt_tokens)
        _note_tools(calibrations, count, prompt_tokens)
        self._note_anchor(target_key, count, prompt_tokens)
        off = count.exact and prompt_tokens >= TINY_TOKENS and abs(deviation.ratio - 1) > 0.05
        if not off or calibrations.has_warned:
            return None
        calibrations.has_warned = True
        return deviation

    def take_over_exact(self, target_key: str, count: Count, prompt_tokens: int, *, is_confirmed: bool = False) -> bool:
        """Learns the number of a prompt that the server cannot have cut: asked for, and shorter than its window.

        Unlike `learn` it believes the number at once, however far from ours: a template may leave out all the tools.

        Args:
            target_key: the deployment.
            count: ours.
            prompt_tokens: the server's.
            is_confirmed: the number leaves out nothing that the server had in its cache.

        Returns:
            False if no vocabulary explains the number.
        """
        if count.raw_tokens <= 0 or not count.fingerprint:
            return False
        if not is_confirmed:
            self.told.compare(target_key, count, prompt_tokens)
        solid = max(0.0, count.raw_tokens - count.allowance_tokens - count.doubtful_tools_tokens)
        if prompt_tokens <= 0 or prompt_tokens > MAX_RATIO * (count.raw_tokens + count.left_out_tokens):
            return False
        if prompt_tokens < _LEAST_EXACT_RATIO * solid and not is_confirmed:
            return False
        if count.extras_tokens:
            self._note_anchor(target_key, count, prompt_tokens, is_sure=True)
            return True
        calibrations = self._of(target_key)
        anchored = Anchored(calibrations, count.counting_method)
        _note_tools(calibrations, count, prompt_tokens)
        if count.profile is None or count.role == "user":
            # Of a prompt with another end some templates leave out the system messages: true of it, and of no other.
            _has_added(calibrations.of(count.counting_method), count, prompt_tokens)
            anchored.learn(count, prompt_tokens)
            if not (count.media_tokens or count.allowance_tokens or count.doubtful_tools_tokens):
                for each in (calibrations.of(count.counting_method), calibrations.of_new(count.counting_method)):
                    each.leave_behind(count.raw_tokens, count.mix, prompt_tokens)
        self._note_anchor(target_key, count, prompt_tokens, is_sure=True)
        return True

    def is_suspicious(self, count: Count, prompt_tokens: int) -> bool:
        """Returns True if the server's number is so far below ours that it has probably cut the prompt."""
        sure_tokens = solid_tokens(count)
        if prompt_tokens <= 0 or sure_tokens < MIN_TRUNCATED_TOKENS:
            return False
        return prompt_tokens < least_ratio_of(count) * sure_tokens

    def may_be_cut(self, count: Count, prompt_tokens: int) -> bool:
        """Returns True if the server's number is so far below ours that a part of the prompt may be missing."""
        sure_tokens = solid_tokens(count)
        return sure_tokens >= MIN_TRUNCATED_TOKENS and prompt_tokens < _WHOLE_RATIO * sure_tokens

    def explains(self, target_key: str, count: Count, prompt_tokens: int) -> bool:
        """Learns a suspicious number if it is how this server counts, by others like it; returns True if so."""
        calibration = self._of(target_key).of(count.counting_method)
        return calibration.explains(count.raw_tokens, count.allowance_tokens, count.mix, prompt_tokens)

    def _note_anchor(self, target_key: str, count: Count, prompt_tokens: int, *, is_sure: bool = False) -> None:
        if count.fingerprint:
            anchor = Anchor.of(count, prompt_tokens, is_sure=is_sure)
            self._anchors.note(target_key, count.counting_method, count.fingerprint, anchor)

    def change_key(self, target_key: str) -> tuple[object, ...]:
        """Changes only if the next counts of a deployment change noticeably."""
        known = self._calibrations.get(target_key)
        return known.change_key() if known is not None else ()

    def as_json(self, target_key: str) -> str:
        """The lessons of a deployment, for another process; no text of any conversation."""
        return self._calibrations.get(target_key, Calibrations()).as_json()

    def take_over(self, target_key: str, text: str) -> None:
        """Adds what another process has learned, and skips what `as_json` cannot have written."""
        self._of(target_key).take_over(text)

    def _text_tokens(self, target_key: str, family: Family, measure: Measure) -> int:
        tokens, rendered = raw_tokens(measure, family), bool(family.template)
        counting_method, mix = _counting_method(family, rendered=rendered), mix_of([measure], family)
        # What a server adds to prompts says nothing of a text by itself, nor do tools that its template leaves out.
        known = self._of(target_key)
        whole, new = (
            each.predict(tokens, mix, family.error_ratio)
            for each in (known.of(counting_method), known.of_new(counting_method))
        )
        factor = 1.0 if rendered and not whole.calibrated else whole.factor
        return ceil(tokens * (max(factor, new.factor) if new.calibrated else factor))

    def _of(self, target_key: str) -> Calibrations:
        found = self._calibrations.get(target_key)
        if found is None:
            # Threads that count texts ask, too.
            found = self._calibrations.setdefault(target_key, Calibrations(self._stamps))
        return found


class GeneratedTokens:
    """Counts a running answer at a constant cost for each delta.

    Text is counted once, in pieces of a few hundred characters that end between words if there are any.

    Attributes:
        tokens: so far; read several times for each delta, so worked out once for each.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._counted_tokens = 0
        self._counted_chars = 0
        self._chars_per_token = _CHARS_PER_TOKEN
        self.tokens = 0
        self._pending: list[str] = []
        self._pending_chars = 0

    def add(self, text: str) -> None:
        """Takes a delta: text, reasoning, or the arguments of a tool call."""
        if not text:
            return
        self._pending.append(text)
        self._pending_chars += len(text)
        if self._pending_chars >= _SETTLED_CHARS:
            self._settle(keep_word=True)
        self.tokens = self._counted_tokens + round(self._pending_chars / self._chars_per_token)

    def of(self, text: str) -> int:
        """The tokens of a text that is not added."""
        return self._count(text)

    def anew(self) -> GeneratedTokens:
        """A new count of the same kind."""
        return GeneratedTokens(self._count)

    def exact(self) -> int:
        """The tokens so far, with the last piece counted too."""
        self._settle()
        self.tokens = self._counted_tokens
        return self._counted_tokens

    def _settle(self, *, keep_word: bool = False) -> None:
        piece = "".join(self._pending)
        end = piece.rfind(" ", len(piece) - _SETTLED_CHARS // 2) if keep_word else -1
        piece, rest = (piece[:end], piece[end:]) if end > 0 else (piece, "")
        if piece:
            self._counted_tokens += self._count(piece)
            self._counted_chars += len(piece)
            if self._counted_tokens:
                self._chars_per_token = min(_CHARS_PER_TOKEN, self._counted_chars / self._counted_tokens)
        self._pending = [rest] if rest else []
        self._pending_chars = len(rest)


async def _extras_tokens(counting: Counting, family: Family, extras: JsonObject) -> float:
    """The most that a request's extras take, if a template writes them once; long ones by pieces."""
    is_long = chars_of(extras) > _EXTRAS_THREAD_CHARS
    as_text = partial(json.dumps, extras, ensure_ascii=False, default=str)
    text = await asyncio.to_thread(as_text) if is_long else as_text()
    pieces = _pieces(text) if len(text) > _EXACT_TEXT_CHARS else [text]
    measured = await counting.texts.get(family.vocabulary, [[Written(piece)] for piece in pieces])
    tokens = sum(raw_tokens(measure, family) for measure in measured)
    return tokens * len(text) / max(1, sum(map(len, pieces)))


def _pieces(text: str) -> list[str]:
    """Equal pieces from all over a text."""
    step = len(text) // _PIECES
    return [text[start : start + _PIECE_CHARS] for start in range(0, step * _PIECES, step)]


async def _fingerprints(request: Request, asker: str) -> Fingerprints:
    chars = sum(len(message.text) for message in request.messages)
    if chars + (chars_of(request.extras) if request.extras else 0) > _THREAD_CHARS:
        return await asyncio.to_thread(fingerprints, request, asker)
    return fingerprints(request, asker)


def _note_tools(calibrations: Calibrations, count: Count, prompt_tokens: int) -> None:
    """Learns the price of tools that the template drops, if nothing else in the prompt is in doubt."""
    if count.rendered and count.doubtful_tools_tokens and not count.allowance_tokens and count.anchor is None:
        calibration = calibrations.of(count.counting_method.removesuffix(_WITH_TOOLS))
        sure_tokens = count.raw_tokens - count.doubtful_tools_tokens
        if sure_tokens > count.doubtful_tools_tokens:
            # The text may be off by more than the tools take.
            return
        calibration.note_tools((prompt_tokens - sure_tokens) / count.doubtful_tools_tokens, sure_tokens)


def _media_doubt(prices: MediaPrices, raw: RawCount, images: int, anchor: Anchor | None) -> int:
    """The tokens that images may take beyond their estimate, of those that the server has not counted yet."""
    new_tokens = raw.media_tokens - (anchor.media_tokens if anchor is not None else 0.0)
    if new_tokens <= 0 or prices.samples.values:
        return 0
    return max(0, ceil(images * new_tokens / raw.media_tokens * MOST_FIXED_TOKENS - new_tokens))


def _has_added(calibration: Calibration, count: Count, prompt_tokens: int) -> bool:
    """Adds a sample of text if the number says enough of it; returns True if a vocabulary explains the number."""
    media_tokens, text_tokens = count.media_tokens, count.raw_tokens - count.media_tokens
    if not media_tokens:
        ratio = calibration.add(
            count.raw_tokens, count.allowance_tokens, count.mix, prompt_tokens, count.left_out_tokens
        )
        return is_plausible(ratio) or is_between_plausible(
            prompt_tokens, count.raw_tokens, count.raw_tokens + count.left_out_tokens
        )
    text_prompt_tokens = round(prompt_tokens - media_tokens * count.media_factor)
    is_mostly_text = media_tokens * count.media_factor <= _MOST_MEDIA_RATIO * text_tokens
    # Of an exact count the difference is the price of media (`prefix.py`).
    if count.profile is not None and is_mostly_text and text_prompt_tokens > 0:
        calibration.add(text_tokens, count.allowance_tokens - media_tokens, count.mix, text_prompt_tokens)
    return is_between_plausible(prompt_tokens, text_tokens, count.raw_tokens)


def _counting_method(family: Family, *, rendered: bool) -> str:
    """Rendered prompts say nothing about the formula, nor one vocabulary about another."""
    return "|".join((family.name, family.vocabulary, family.template if rendered else ""))


def _rounded(sizes: Iterable[float]) -> list[int]:
    """Sizes in whole tokens that add up to no more than one above the exact sum."""
    # The floating-point sum may be a little too high.
    edges = [0, *(ceil(edge - 1e-6) for edge in accumulate(sizes))]
    return [after - before for before, after in pairwise(edges)]


logger = logging.getLogger("litellm_compaction")

# `countTokens` may add the token that begins a prompt, or a chat the beginning of the answer: no more than this.
_MOST_CONSTANT_TOKENS = 32
# A larger share of a prompt is no constant yet: a count that is 13 % too low looks like one in a short prompt.
_MOST_CONSTANT_RATIO = 0.02
# Two numbers for one prompt that are no further apart are the same.
_SAME_TOKENS, _SAME_RATIO = 2, 0.005
_MOST_PRICE_DOUBT = 0.01
# A count is taken to be no more than so many times too low before an answer confirms it.
_UNCONFIRMED_RATIO = 1.2
_DOUBTED_S = 3600.0
_MAX_TOLD = 1024


class _Told(NamedTuple):
    tokens: int
    beside_tokens: int
    label: str


class ToldCounts:
    """The counts of LM Studio's protocol, by deployment and fingerprint of the request."""

    def __init__(self, prices_of: Callable[[str], MediaPrices], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._prices_of = prices_of
        self._told: Bounded[tuple[str, int], _Told] = Bounded(_MAX_TOLD)
        self._constants: Bounded[str, int] = Bounded(_MAX_TARGETS)
        self._doubted: Rests[str] = Rests(_DOUBTED_S, _DOUBTED_S, clock)

    def is_believed(self, target_key: str) -> bool:
        """Returns True if its counts were those of answers, as far as both are known."""
        return self._doubted.is_over(target_key)

    def take(self, target_key: str, label: str, count: Count, tokens: int, beside_tokens: int = 0) -> int | None:
        """The number that an answer will have; it is compared later.

        Args:
            target_key: the deployment.
            label: its name in logs.
            count: ours.
            tokens: the protocol's.
            beside_tokens: of reasoning and extras, which it leaves out.

        Returns:
            None if it has images whose price is not known well enough.
        """
        if count.fingerprint:
            self._told[target_key, count.fingerprint] = _Told(tokens, beside_tokens, label)
        tokens += self._constants.get(target_key, 0) + beside_tokens
        least, most = self._prices_of(target_key).between(count.media_tokens, count.images)
        return tokens + ceil(most) if most - least <= _MOST_PRICE_DOUBT * tokens else None

    def is_unconfirmed(self, target_key: str, count: Count) -> bool:
        """Returns True for a prompt that the protocol has counted, of a model whose answers have confirmed no count."""
        return (target_key, count.fingerprint) in self._told and target_key not in self._constants

    def doubt_tokens(self, target_key: str, count: Count) -> int:
        """Tokens that the protocol may have left out of a count, until an answer confirms it (promise P1).

        0 if it counts no less than we do; no more than a count that is a sixth too low leaves out.
        """
        if not self.is_unconfirmed(target_key, count):
            return 0
        return max(0, ceil(min(count.raw_tokens, _UNCONFIRMED_RATIO * count.tokens)) - count.tokens)

    def compare(self, target_key: str, count: Count, prompt_tokens: int) -> None:
        """Compares a count with the answer to the same request, and learns the price of its images."""
        told = self._told.pop((target_key, count.fingerprint), None)
        if told is None:
            return
        more, known = prompt_tokens - told.tokens, self._constants.get(target_key)
        same_tokens = max(_SAME_TOKENS, _SAME_RATIO * told.tokens)
        if count.images:
            # Reasoning in older turns may not be in the number.
            if told.beside_tokens <= same_tokens:
                prices = self._prices_of(target_key)
                prices.note(count.media_tokens, more - (known or 0), 0.0, images=count.images)
        elif told.beside_tokens:
            # A template shows it or leaves it out. Anything between is no reason for doubt.
            if known is None and min(abs(more), abs(more - told.beside_tokens)) <= same_tokens:
                self._constants[target_key] = 0
        elif known is None and abs(more) <= _MOST_CONSTANT_TOKENS:
            if abs(more) <= max(_SAME_TOKENS, _MOST_CONSTANT_RATIO * told.tokens):
                self._constants[target_key] = more
        elif abs(more - (known or 0)) > same_tokens:
            self._constants.pop(target_key, None)
            if self._doubted.begin(target_key):
                logger.warning(
                    "ask_server model=%s: LM Studio's protocol counted %d tokens and its answer %d for one prompt; for "
                    "an hour the answers' numbers count alone (logged once)",
                    told.label,
                    told.tokens,
                    prompt_tokens,
                )
