"""How many tokens a request takes, message by message, and how far that can be from the truth.

Called by the engine on every request, and with the server's `prompt_tokens` after every answer.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

from litellm_compaction.core.messages import Request
from litellm_compaction.models.calibration import (
    MIN_TRUNCATED_TOKENS,
    TINY_TOKENS,
    Calibration,
    Mix,
    Prediction,
    is_plausible,
)
from litellm_compaction.models.counting import EXACT_ERROR, Counting, RawCount, mix_of, raw_tokens
from litellm_compaction.models.counts import Count, Deviation, least_ratio, solid_ratio
from litellm_compaction.models.families import Family
from litellm_compaction.models.growth import Growth, Profile
from litellm_compaction.models.measures import Item, Measure
from litellm_compaction.models.prefix_anchors import Anchor, Anchors, Fingerprints, fingerprints
from litellm_compaction.models.usable import usable, usable_soon

__all__ = ["Count", "Deviation", "TokenCounter"]

# Wildcard deployments get their model names from clients, so the number of calibrations needs an end.
_MAX_TARGETS = 4096
# Hashes of more text than this are made outside the event loop's thread.
_THREAD_CHARS = 1_000_000
# Of a prompt that the server has counted, so much may be rendered as more when its turns are old.
_OLD_TURNS_ERROR = 0.005
# A number so far below what its prefix had is not taken for an anchor the first time.
_LOW_ERROR = 0.05
# More than this cannot be an addition only; taken for one, it would leave no room for the conversation.
_MAX_ADDED_RATIO = 1.5
# So sure must a reading be that it is called safe, and never closer than this to what new messages take.
_SURE_DEVIATIONS, _LEAST_GROWTH_ERROR = 3.0, 0.25
# What new messages take by themselves is learned beside what whole prompts take.
_GROWTH = "|new"
_MAX_BASES = 8
# Whole counts, of about 30 bytes per message.
_MAX_RECENT = 256
_VERSION = 1
# What a compaction may leave of a prompt.
_COMPACTED_RATIO = 0.25


class _Reading(NamedTuple):
    """Tokens of a request by all that is known; `factor` per raw token of its messages and tools."""

    tokens: float
    factor: float
    error_ratio: float


class TokenCounter:
    """Counts for any number of deployments, and remembers what their servers counted."""

    def __init__(self) -> None:
        self._counting = Counting()
        self._anchors = Anchors()
        self._recent: OrderedDict[tuple[Family, int], RawCount] = OrderedDict()
        # By deployment and basis.
        self._calibrations: OrderedDict[str, dict[str, Calibration]] = OrderedDict()
        self._warned: set[str] = set()
        self._low: set[tuple[str, str]] = set()

    async def count(self, target_key: str, family: Family, request: Request) -> Count:
        """The tokens of a request. Never raises on its content.

        Args:
            target_key: the deployment, for what its server has counted.
            family: of its model.
            request: what is sent to it.
        """
        family = await usable_soon(family)
        prints = await _fingerprints(request)
        raw = await self._raw(family, request, prints)
        basis = _basis(family, rendered=raw.rendered)
        prediction = self._predict(target_key, basis, raw.tokens, raw.mix, raw.error_ratio)
        # Of a shorter prompt more samples hold, and the one that says most counts.
        shorter = self._predict(target_key, basis, raw.tokens * _COMPACTED_RATIO, raw.mix, raw.error_ratio)
        text_factor = max(prediction.factor, shorter.factor)
        role = request.messages[-1].role if request.messages else ""
        anchor = self._anchors.find(target_key, basis, prints)
        reading = self._anchored(target_key, basis, raw, prediction, anchor) if anchor else None
        if anchor is not None and reading is not None and raw.profile is not None and anchor.role != role:
            like = self._anchors.find(target_key, basis, prints, role=role)
            anchor, reading = self._of_like_end(target_key, basis, raw, (anchor, reading), like)
        if reading is None:
            factor, error_ratio = prediction.factor, prediction.error_ratio
            sizes = tuple(ceil(size * factor) for size in raw.sizes)
            tools_tokens = ceil(raw.tools_tokens * factor)
            overhead_tokens = ceil(raw.overhead_tokens * factor)
        else:
            error_ratio = reading.error_ratio
            tools_tokens, *parts = _rounded((raw.tools_tokens, *raw.sizes), reading.factor)
            sizes = tuple(parts)
            overhead_tokens = max(0, ceil(reading.tokens) - tools_tokens - sum(sizes))
        return Count(
            tokens=overhead_tokens + tools_tokens + sum(sizes),
            sizes=sizes,
            tools_tokens=tools_tokens,
            overhead_tokens=overhead_tokens,
            error_ratio=error_ratio,
            text_error_ratio=max(error_ratio, prediction.error_ratio),
            text_ratio=max(1.0, text_factor / max(prediction.factor if reading is None else reading.factor, 0.01)),
            exact=raw.exact and raw.allowance_tokens == 0,
            raw_tokens=raw.tokens,
            rendered=raw.rendered,
            allowance_tokens=raw.allowance_tokens,
            mix=raw.mix,
            calibrated=prediction.calibrated,
            basis=basis,
            profile=raw.profile,
            role=role,
            fingerprint=prints[-1] if prints else 0,
            anchor=anchor,
        )

    async def _raw(self, family: Family, request: Request, prints: Fingerprints) -> RawCount:
        """The uncalibrated count; a request that has just been counted, as two hooks do, is not counted again."""
        if not prints:
            return await self._counting.count(family, request)
        key = (family, prints[-1])
        found = self._recent.pop(key, None)
        if found is None:
            found = await self._counting.count(family, request, prints)
        self._recent[key] = found
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)
        return found

    async def prepare(self, family: Family) -> None:
        """Loads what counts a family, so that no request is the first one: some calls hold the interpreter lock."""
        await usable_soon(family)

    async def count_text(self, target_key: str, family: Family, text: str) -> int:
        """Calibrated tokens of a text by itself, without any template around it."""
        family = await usable_soon(family)
        (measure,) = await self._counting.measures.get(family.vocabulary, [Item((text,))])
        return self._text_tokens(target_key, family, measure)

    def text_counter(self, target_key: str, family: Family) -> Callable[[str], int]:
        """`count_text` for pure callers: counts in the caller's thread, about 0.1 s per MB when the text is new."""

        def count_text_now(text: str) -> int:
            usual = usable(family)
            (measure,) = self._counting.measures.get_now(usual.vocabulary, [Item((text,))])
            return self._text_tokens(target_key, usual, measure)

        return count_text_now

    def learn(self, target_key: str, count: Count, prompt_tokens: int) -> Deviation | None:
        """Takes over what the server counted for the request that `count` belongs to.

        Not learned: no number (≤ 0), a ratio that no vocabulary explains, a prompt that was probably cut, and the first
        number that may leave out what the server had in its cache.

        Returns:
            A deviation where the number was refused, and the first time that an exact family is off by more than 5 %.
        """
        if prompt_tokens <= 0 or count.raw_tokens <= 0:
            return None
        deviation = Deviation(
            expected=round(count.raw_tokens), actual=prompt_tokens, ratio=prompt_tokens / count.raw_tokens
        )
        if self.is_suspicious(count, prompt_tokens):
            if not self.explains(target_key, count, prompt_tokens):
                return deviation
        elif self._is_low(target_key, count, prompt_tokens):
            return None
        else:
            ratio = self._calibration(target_key, count.basis).add(
                count.raw_tokens, count.allowance_tokens, count.mix, prompt_tokens
            )
            if not is_plausible(ratio):
                return deviation
            self._learn_growth(target_key, count, prompt_tokens)
        if count.fingerprint:
            anchor = Anchor(prompt_tokens, count.raw_tokens, count.mix, count.profile, count.role)
            self._anchors.note(target_key, count.basis, count.fingerprint, anchor)
        off = count.exact and prompt_tokens >= TINY_TOKENS and abs(deviation.ratio - 1) > 0.05
        if not off or target_key in self._warned:
            return None
        self._warned.add(target_key)
        return deviation

    def is_suspicious(self, count: Count, prompt_tokens: int) -> bool:
        """Whether the server's number is so far below ours that it has probably cut the prompt."""
        solid_tokens = count.tokens * solid_ratio(count)
        if prompt_tokens <= 0 or solid_tokens < MIN_TRUNCATED_TOKENS:
            return False
        return prompt_tokens < _least_of(count) * solid_tokens

    def explains(self, target_key: str, count: Count, prompt_tokens: int) -> bool:
        """Whether a suspicious number is how this server counts, after others like it; then it is learned."""
        calibration = self._calibration(target_key, count.basis)
        return calibration.explains(count.raw_tokens, count.allowance_tokens, count.mix, prompt_tokens)

    def gist(self, target_key: str) -> tuple[object, ...]:
        """Changes only when what was learned of a deployment has changed noticeably."""
        return tuple((basis, found.gist()) for basis, found in self._of(target_key))

    def as_json(self, target_key: str) -> str:
        """What was learned of a deployment, for another process; no text of anybody."""
        return json.dumps(
            {"version": _VERSION, "calibrations": {k: found.as_json() for k, found in self._of(target_key)}}
        )

    def take_over(self, target_key: str, text: str) -> None:
        """Adds what another process has learned; whatever `as_json` cannot have written is ignored."""
        try:
            facts = json.loads(text)
        except (RecursionError, ValueError):
            return
        if not isinstance(facts, dict) or facts.get("version") != _VERSION:
            return
        calibrations = facts.get("calibrations")
        for basis, rows in list(calibrations.items())[:_MAX_BASES] if isinstance(calibrations, dict) else ():
            self._calibration(target_key, basis).take_over(rows)

    def _learn_growth(self, target_key: str, count: Count, prompt_tokens: int) -> None:
        """Learns what new messages take by themselves: a ratio of whole prompts has a server's additions in it."""
        if count.profile is not None:
            growths = self._calibration(target_key, count.basis).growths
            if count.anchor is None or count.anchor.profile is None:
                growths.note_whole(count.profile, count.tools_tokens, prompt_tokens)
            else:
                new_prompt_tokens = prompt_tokens - count.anchor.prompt_tokens
                like_ends = count.role == count.anchor.role
                growths.note(count.profile.since(count.anchor.profile), new_prompt_tokens, like_ends=like_ends)
            return
        if count.anchor is None or count.allowance_tokens:
            return
        new_tokens, new_prompt_tokens = (
            count.raw_tokens - count.anchor.raw_tokens,
            prompt_tokens - count.anchor.prompt_tokens,
        )
        if min(new_tokens, new_prompt_tokens) >= TINY_TOKENS:
            mix = count.anchor.new_mix(count.raw_tokens, count.mix)
            self._calibration(target_key, count.basis + _GROWTH).add(new_tokens, 0.0, mix, new_prompt_tokens)

    def _is_low(self, target_key: str, count: Count, prompt_tokens: int) -> bool:
        """Whether a number may leave out what the server had in its cache; the second in a row is believed.

        Templates that render less of what is old look the same, once in a while.
        """
        key = (target_key, count.basis)
        if prompt_tokens >= self._least_tokens(target_key, count) or key in self._low:
            self._low.discard(key)
            return False
        self._low.add(key)
        return True

    def _least_tokens(self, target_key: str, count: Count) -> float:
        """What a server has counted at least if it has counted all of the prompt."""
        anchor = count.anchor
        if anchor is None:
            return _least_of(count) * solid_ratio(count) * count.tokens
        if count.profile is not None and anchor.profile is not None:
            growth = self._growth(target_key, count.basis, count.profile.since(anchor.profile))
            least = (1 - _LOW_ERROR) * growth.tokens - _SURE_DEVIATIONS * growth.doubt_tokens
            return (1 - _OLD_TURNS_ERROR) * anchor.prompt_tokens + max(0.0, least) - count.allowance_tokens
        new_tokens = max(0.0, count.raw_tokens - anchor.raw_tokens)
        mix = anchor.new_mix(count.raw_tokens, count.mix)
        new = self._predict(target_key, count.basis + _GROWTH, new_tokens, mix, EXACT_ERROR)
        if new.calibrated or count.exact:
            least = new.factor * (1 - max(_LOW_ERROR, new.error_ratio))
        else:
            least = least_ratio(mix, new.error_ratio, is_sure=False)
        return (1 - _OLD_TURNS_ERROR) * anchor.prompt_tokens + new_tokens * least - count.allowance_tokens

    def _anchored(
        self, target_key: str, basis: str, raw: RawCount, prediction: Prediction, anchor: Anchor
    ) -> _Reading | None:
        """The count by the longest prefix that the server has counted; None where it cannot be trusted."""
        new_tokens = raw.tokens - anchor.raw_tokens
        if raw.profile is not None and anchor.profile is not None:
            growth = self._growth(target_key, basis, raw.profile.since(anchor.profile))
            tokens = anchor.prompt_tokens + growth.tokens
            # New text of another kind may take as much as the stand-in's own count, which errs high.
            wrong_tokens = max(
                _SURE_DEVIATIONS * growth.doubt_tokens, _LEAST_GROWTH_ERROR * growth.tokens, new_tokens - growth.tokens
            )
        elif new_tokens < 0:
            # The template leaves out what it rendered before; only a rendered prompt shows how much.
            tokens = anchor.prompt_tokens + (new_tokens if raw.exact else 0.0)
            wrong_tokens = -new_tokens * EXACT_ERROR
        else:
            mix = anchor.new_mix(raw.tokens, raw.mix)
            new = self._predict(target_key, basis + _GROWTH, new_tokens, mix, raw.error_ratio)
            if not new.calibrated:
                new = self._predict(target_key, basis, new_tokens, mix, raw.error_ratio)
                new = new._replace(error_ratio=max(new.error_ratio, raw.error_ratio))
            tokens = anchor.prompt_tokens + new_tokens * new.factor
            wrong_tokens = new_tokens * new.factor * new.error_ratio
            if not raw.exact:
                # A stand-in that counted too high so far may fit the new text: tables before, prose now.
                wrong_tokens = max(wrong_tokens, new_tokens * (1 - new.factor))
        least = least_ratio(raw.mix, prediction.error_ratio, is_sure=prediction.calibrated or raw.exact)
        if tokens < least * (raw.tokens - raw.allowance_tokens) * prediction.factor:
            return None
        error_ratio = max(EXACT_ERROR, (wrong_tokens + _OLD_TURNS_ERROR * anchor.prompt_tokens) / tokens)
        factor = tokens / raw.tokens if raw.tokens > 0 else 1.0
        if raw.exact and factor <= _MAX_ADDED_RATIO:
            # What a server adds to a prompt that we render exactly belongs to no message.
            factor = min(factor, 1.0)
        return _Reading(tokens, factor, error_ratio)

    def _of_like_end(
        self, target_key: str, basis: str, raw: RawCount, longest: tuple[Anchor, _Reading], like: Anchor | None
    ) -> tuple[Anchor, _Reading]:
        """The reading to go by where the longest prefix ends in another role than the request, and so may lack a part.

        Args:
            target_key: the deployment.
            basis: how `raw` was counted.
            raw: the count.
            longest: the prefix and its reading.
            like: the longest prefix that ends in the request's role.
        """
        anchor, reading = longest
        if raw.profile is None:
            return longest
        if like is not None and like.profile is not None:
            growth = self._growth(target_key, basis, raw.profile.since(like.profile))
            tokens = like.prompt_tokens + growth.tokens
            if abs(tokens - reading.tokens) <= _SURE_DEVIATIONS * growth.doubt_tokens + EXACT_ERROR * reading.tokens:
                return longest
            most = max(tokens + _SURE_DEVIATIONS * growth.doubt_tokens, reading.tokens)
            return like, _Reading(tokens, tokens / raw.tokens, max(EXACT_ERROR, most / tokens - 1))
        whole = self._calibration(target_key, basis).growths.predict_whole(raw.profile, raw.tools_tokens)
        if whole.tokens > reading.tokens + _SURE_DEVIATIONS * whole.doubt_tokens:
            most = whole.tokens + whole.doubt_tokens
            reading = reading._replace(error_ratio=max(reading.error_ratio, most / reading.tokens - 1))
        return anchor, reading

    def _growth(self, target_key: str, basis: str, new: Profile) -> Growth:
        return self._calibration(target_key, basis).growths.predict(new)

    def _text_tokens(self, target_key: str, family: Family, measure: Measure) -> int:
        tokens, rendered = raw_tokens(measure, family), bool(family.template)
        basis, mix = _basis(family, rendered=rendered), mix_of([measure], family)
        prediction = self._predict(target_key, basis, tokens, mix, family.error_ratio)
        # What a server injects into prompts says nothing of a text by itself.
        factor = 1.0 if rendered and not prediction.calibrated else prediction.factor
        return ceil(tokens * factor)

    def _predict(self, target_key: str, basis: str, tokens: float, mix: Mix, error_ratio: float) -> Prediction:
        prediction = self._calibration(target_key, basis).predict(tokens, mix, error_ratio)
        if error_ratio <= EXACT_ERROR and abs(prediction.factor - 1) <= EXACT_ERROR:
            # The server agrees, so few samples are no reason for doubt.
            return prediction._replace(error_ratio=min(prediction.error_ratio, EXACT_ERROR))
        return prediction

    def _calibration(self, target_key: str, basis: str) -> Calibration:
        by_basis = self._calibrations.get(target_key)
        if by_basis is None:
            by_basis = self._calibrations[target_key] = {}
            if len(self._calibrations) > _MAX_TARGETS:
                forgotten, bases = self._calibrations.popitem(last=False)
                self._warned.discard(forgotten)
                self._low.difference_update((forgotten, each) for each in bases)
        found = by_basis.get(basis)
        if found is None:
            found = by_basis[basis] = Calibration()
        return found

    def _of(self, target_key: str) -> list[tuple[str, Calibration]]:
        known = self._calibrations.get(target_key, {})
        return [(basis, found) for basis, found in known.items() if not found.is_empty][-_MAX_BASES:]


async def _fingerprints(request: Request) -> Fingerprints:
    if sum(len(message.text) for message in request.messages) > _THREAD_CHARS:
        return await asyncio.to_thread(fingerprints, request)
    return fingerprints(request)


def _basis(family: Family, *, rendered: bool) -> str:
    """What was learned of rendered prompts says nothing about the formula, nor of one vocabulary about another."""
    return "|".join((family.name, family.vocabulary, family.template if rendered else ""))


def _rounded(sizes: Iterable[float], factor: float) -> list[int]:
    """Sizes by a factor, in whole tokens that add up to no more than one above the exact sum."""
    edges = [0, *(ceil(edge * factor) for edge in accumulate(sizes))]
    return [after - before for before, after in pairwise(edges)]


def _least_of(count: Count) -> float:
    return least_ratio(count.mix, count.error_ratio, is_sure=count.calibrated or count.exact)
