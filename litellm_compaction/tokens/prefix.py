"""Prefix anchors: servers' numbers for prompts that later requests begin with, and counts by them.

An anchor absorbs whatever a server adds to prompts, for any model, known or not: only the new messages are an estimate
(measured 2026-11: 0.1 % median error on agent sessions, against 1–2 % by calibration alone). Conversations are not kept
here: an anchor is a hash and some numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.tokens.calibration import EXACT_ERROR, TINY_TOKENS, Calibrations, Prediction
from litellm_compaction.tokens.count import (
    Anchor,
    Count,
    Fingerprints,
    RawCount,
    least_ratio,
    least_ratio_of,
    solid_tokens,
)
from litellm_compaction.tokens.growth import Growth, Profile
from litellm_compaction.tokens.media import UNKNOWN, Price

# About 760 bytes each (measured 2026-11-23).
_MAX_ANCHORS = 16_384
# Of a prompt that the server has counted, so much may be rendered as more when its turns are old.
_OLD_TURNS_ERROR = 0.005
# A number so far below what its prefix had is not taken for an anchor the first time.
_LOW_ERROR = 0.05
# So sure must a reading be that it is called safe, and never closer than this to what new messages take.
_SURE_DEVIATIONS, _LEAST_GROWTH_ERROR = 3.0, 0.35


class Anchors:
    """The newest anchors of all deployments; used between two awaits only, so it needs no lock."""

    def __init__(self) -> None:
        self._entries: Bounded[tuple[str, str, int], Anchor] = Bounded(_MAX_ANCHORS)

    def note(self, target_key: str, counting_method: str, fingerprint: int, anchor: Anchor) -> None:
        """Remembers the true count of a prompt by the last fingerprint of its request.

        A second number for the same prompt stands only if it is higher, or the server was asked for it: some servers
        leave out the part that was in their cache.
        """
        key = (target_key, counting_method, fingerprint)
        known = self._entries.get(key)
        if known is None or known.prompt_tokens < anchor.prompt_tokens or anchor.is_sure:
            self._entries[key] = anchor
        else:
            self._entries.move_to_end(key)

    def find(
        self, target_key: str, counting_method: str, prints: Fingerprints, *, role: str | None = None
    ) -> Anchor | None:
        """The longest known prompt that a request begins with, the whole of it included.

        Args:
            target_key: the deployment.
            counting_method: as in `Count`.
            prints: the request's.
            role: of the prompt's last message; None for any.
        """
        for fingerprint in reversed(prints[1:]):
            key = (target_key, counting_method, fingerprint)
            found = self._entries.get(key)
            if found is not None and role in (None, found.role):
                self._entries.move_to_end(key)
                return found
        return None


def fingerprints(request: Request, asker: str = "") -> Fingerprints:
    """Entry i stands for the first i messages, to the letter, with the request's tools and extras: 0.5 ms per new MB.

    Empty if the request cannot be written as JSON. The same request of two tenants (`asker`) has no entry in common, so
    that the count and the time of one's request do not tell what the other has sent.
    """
    try:
        beside = [request.tools, request.tool_choice, *([request.extras] if request.extras else [])]
        entry = hash((asker, json.dumps(beside)))
        entries = [entry]
        for message in request.messages:
            entry = hash((entry, *_content(message)))
            entries.append(entry)
    except (RecursionError, TypeError, ValueError):
        return ()
    return tuple(entries)


def _content(message: Message) -> Sequence[str]:
    """All of a message, its text without a copy if it is plain."""
    content = message.raw.get("content")
    if not isinstance(content, str):
        return (json.dumps(message.raw),)
    if len(message.raw) == 2:
        return message.role, content
    return content, json.dumps({key: value for key, value in message.raw.items() if key != "content"})


class Reading(NamedTuple):
    """Tokens of a request by all that is known.

    Attributes:
        factor: per raw token of text in its messages and tools.
        media_factor: per estimated token of images and sound.
    """

    tokens: float
    factor: float
    error_ratio: float
    media_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Anchored:
    """Reads counts from anchors, and learns from them, for prompts of one deployment and counting method."""

    _calibrations: Calibrations
    _counting_method: str

    def price(self, raw: RawCount) -> Price:
        """Of the images and the sound of a request."""
        if not raw.media:
            return UNKNOWN
        calibration = self._calibrations.of(self._counting_method)
        return calibration.media.price() if raw.profile is None else Price(calibration.growths.media_ratio())

    def read_alone(self, raw: RawCount, prediction: Prediction) -> Reading:
        """The count of a prompt without an anchor."""
        text_tokens, price = raw.text_tokens * prediction.factor, self.price(raw)
        media_tokens = raw.media_tokens * price.factor
        error_ratio = prediction.error_ratio
        if price.doubt_ratio is not None:
            wrong_tokens = text_tokens * error_ratio + raw.media_tokens * price.doubt_ratio
            error_ratio = max(EXACT_ERROR, wrong_tokens / max(1.0, text_tokens + media_tokens))
        return Reading(text_tokens + media_tokens, prediction.factor, error_ratio, price.factor)

    def read(self, raw: RawCount, prediction: Prediction, anchor: Anchor) -> Reading | None:
        """The count by the longest prefix that the server has counted; None if it cannot be trusted."""
        price = self.price(raw)
        new_tokens = raw.text_tokens - anchor.text_tokens
        estimated_tokens = max(0.0, raw.media_tokens - anchor.media_tokens)
        new_media_tokens = estimated_tokens * price.factor
        if raw.profile is not None and anchor.profile is not None:
            growth = self._growth(raw.profile.since(anchor.profile))
            tokens = anchor.prompt_tokens + growth.tokens
            wrong_tokens = self._growth_error(raw, growth, prediction.factor, anchor)
        elif new_tokens < 0:
            # The template leaves out what it rendered before; only a rendered prompt shows how much.
            tokens = anchor.prompt_tokens + (new_tokens if raw.exact else 0.0) + new_media_tokens
            wrong_tokens = -new_tokens * EXACT_ERROR
        else:
            new = self._predict_new(raw, new_tokens, anchor)
            tokens = anchor.prompt_tokens + new_tokens * new.factor + new_media_tokens
            wrong_tokens = new_tokens * new.factor * new.error_ratio
            if not raw.exact:
                # A stand-in that counted too high so far may fit the new text: tables before, prose now.
                wrong_tokens = max(wrong_tokens, new_tokens * (1 - new.factor))
            wrong_tokens += estimated_tokens * (raw.error_ratio if price.doubt_ratio is None else price.doubt_ratio)
        least = least_ratio(raw.mix, prediction.error_ratio, is_sure=prediction.calibrated or raw.exact)
        if not anchor.is_sure and tokens < least * (raw.tokens - raw.allowance_tokens) * prediction.factor:
            return None
        error_ratio = max(EXACT_ERROR, (wrong_tokens + _OLD_TURNS_ERROR * anchor.prompt_tokens) / tokens)
        factor, media_factor = self._factors(raw, tokens, prediction.factor)
        return Reading(tokens, factor, error_ratio, media_factor)

    def read_like_end(
        self, raw: RawCount, longest: tuple[Anchor, Reading], like: Anchor | None, missing_tokens: float
    ) -> tuple[Anchor, Reading]:
        """The better anchor and reading if the longest prefix ends in another role, and so may lack a part.

        Without it 3 to 5 of 244 counts for Mistral Nemo's and v3's templates were too low, by up to 55 %, and 4 of 258
        requests were over a window of 8,192 tokens (2026-11-23).

        Args:
            raw: our count.
            longest: the prefix and its reading.
            like: the longest prefix that ends in the request's role.
            missing_tokens: of system messages that the template may render before such an end only.
        """
        anchor, reading = longest
        if raw.profile is None:
            return longest
        reading = reading._replace(error_ratio=reading.error_ratio + missing_tokens / reading.tokens)
        if like is not None and like.profile is not None:
            growth = self._growth(raw.profile.since(like.profile))
            tokens = like.prompt_tokens + growth.tokens
            if abs(tokens - reading.tokens) <= _SURE_DEVIATIONS * growth.doubt_tokens + EXACT_ERROR * reading.tokens:
                return anchor, reading
            most = max(tokens + self._growth_error(raw, growth, reading.factor, like), reading.tokens)
            factor, media_factor = self._factors(raw, tokens, reading.factor)
            return like, Reading(tokens, factor, max(EXACT_ERROR, most / tokens - 1), media_factor)
        return anchor, reading

    def _growth_error(self, raw: RawCount, growth: Growth, factor: float, anchor: Anchor) -> float:
        """Tokens by which new messages may be more than their growth.

        New text of another kind may take as much as the stand-in's own count, which errs high. After few numbers it may
        take what was feared before anything was known, later no more than that.
        """
        media_tokens = max(0.0, raw.media_tokens - anchor.media_tokens) * self.price(raw).factor
        text_tokens = raw.text_tokens - anchor.text_tokens
        most_tokens = (text_tokens * max(1.0, factor) + media_tokens) * (1 + raw.error_ratio)
        if raw.profile is not None and anchor.profile is not None:
            # In some vocabularies every digit stands alone, which a log or a table shows first.
            most_tokens += max(0.0, raw.profile.digit_tokens - anchor.profile.digit_tokens)
        doubt_tokens = most_tokens - growth.tokens
        if self._calibrations.of(self._counting_method).growths.is_settled:
            doubt_tokens = min(doubt_tokens, _SURE_DEVIATIONS * growth.doubt_tokens)
        return max(
            doubt_tokens,
            _LEAST_GROWTH_ERROR * growth.tokens,
            text_tokens + media_tokens - growth.tokens,
        )

    def least_tokens(self, count: Count) -> float:
        """The least that the server has counted if it has counted all of the prompt."""
        anchor = count.anchor
        if anchor is None:
            return least_ratio_of(count) * solid_tokens(count)
        if count.profile is not None and anchor.profile is not None:
            growth = self._growth(count.profile.since(anchor.profile))
            least = (1 - _LOW_ERROR) * growth.tokens - _SURE_DEVIATIONS * growth.doubt_tokens
            return (1 - _OLD_TURNS_ERROR) * anchor.prompt_tokens + max(0.0, least) - count.allowance_tokens
        new_tokens = max(0.0, count.raw_tokens - anchor.raw_tokens)
        mix = anchor.new_mix(count.raw_tokens, count.mix)
        new = self._calibrations.of_new(self._counting_method).predict(new_tokens, mix, EXACT_ERROR)
        if new.calibrated or count.exact:
            least = new.factor * (1 - max(_LOW_ERROR, new.error_ratio))
        else:
            least = least_ratio(mix, new.error_ratio, is_sure=False)
        return (1 - _OLD_TURNS_ERROR) * anchor.prompt_tokens + new_tokens * least - count.allowance_tokens

    def learn(self, count: Count, prompt_tokens: int) -> None:
        """Learns what new messages take by themselves: a ratio of whole prompts has a server's additions in it."""
        if count.profile is not None:
            growths = self._calibrations.of(self._counting_method).growths
            if count.anchor is None or count.anchor.profile is None:
                growths.note_whole(count.profile, count.tools_tokens, prompt_tokens)
            else:
                new_prompt_tokens = prompt_tokens - count.anchor.prompt_tokens
                like_ends = count.role == count.anchor.role
                growths.note(count.profile.since(count.anchor.profile), new_prompt_tokens, like_ends=like_ends)
            return
        self._learn_price(count, prompt_tokens)
        if count.anchor is None or count.allowance_tokens:
            return
        new_tokens, new_prompt_tokens = (
            count.raw_tokens - count.anchor.raw_tokens,
            prompt_tokens - count.anchor.prompt_tokens,
        )
        if min(new_tokens, new_prompt_tokens) >= TINY_TOKENS:
            mix = count.anchor.new_mix(count.raw_tokens, count.mix)
            left_out_tokens = max(0.0, count.left_out_tokens - count.anchor.left_out_tokens)
            self._calibrations.of_new(self._counting_method).add(
                new_tokens, 0.0, mix, new_prompt_tokens, left_out_tokens
            )

    def _learn_price(self, count: Count, prompt_tokens: int) -> None:
        """Learns the price of images and sound, if the text beside them is known well."""
        if not count.media_tokens:
            return
        anchor = count.anchor
        text_tokens, media_tokens = count.raw_tokens - count.media_tokens, count.media_tokens
        # Reasoning of older turns may be left out.
        doubt_tokens = count.allowance_tokens - count.media_tokens
        if anchor is not None:
            text_tokens, media_tokens = text_tokens - anchor.text_tokens, media_tokens - anchor.media_tokens
            prompt_tokens -= anchor.prompt_tokens
        calibration = self._calibrations.of(self._counting_method)
        text = calibration.predict(text_tokens, count.mix, _LOW_ERROR)
        doubt_tokens += abs(text_tokens) * text.error_ratio
        price_tokens, images = (
            prompt_tokens - text_tokens * text.factor,
            count.images * media_tokens / count.media_tokens,
        )
        calibration.media.note(media_tokens, price_tokens, doubt_tokens, images=images)

    def _factors(self, raw: RawCount, tokens: float, text_factor: float) -> tuple[float, float]:
        """The factors of text and media that make `tokens`: text as it usually is, the rest is media's."""
        if not raw.media:
            return (tokens / raw.tokens if raw.tokens > 0 else 1.0), 1.0
        most_tokens = raw.media_tokens * self.price(raw).factor
        media_tokens = min(most_tokens, max(0.0, tokens - raw.text_tokens * text_factor))
        factor = (tokens - media_tokens) / raw.text_tokens if raw.text_tokens > 0 else text_factor
        return factor, media_tokens / raw.media_tokens

    def _growth(self, new: Profile) -> Growth:
        return self._calibrations.of(self._counting_method).growths.predict(new)

    def _predict_new(self, raw: RawCount, new_tokens: float, anchor: Anchor) -> Prediction:
        """Of messages after an anchor, by such messages or else by whole prompts."""
        mix = anchor.new_mix(raw.tokens, raw.mix)
        new = self._calibrations.of_new(self._counting_method).predict(new_tokens, mix, raw.error_ratio)
        if new.calibrated:
            return new
        new = self._calibrations.of(self._counting_method).predict(new_tokens, mix, raw.error_ratio)
        return new._replace(error_ratio=max(new.error_ratio, raw.error_ratio))
