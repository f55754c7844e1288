"""How many tokens a prompt takes whose beginning the server has counted, and what its number teaches of the rest.

Called by `counter.py` with the anchors that it found. Only the messages behind an anchor are an estimate, by what such
messages took at this deployment so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from litellm_compaction.models.calibration import EXACT_ERROR, TINY_TOKENS, Prediction
from litellm_compaction.models.calibrations import Calibrations
from litellm_compaction.models.counting import RawCount
from litellm_compaction.models.counts import Count, least_ratio, least_ratio_of, solid_ratio
from litellm_compaction.models.growth import Growth, Profile
from litellm_compaction.models.prefix_anchors import Anchor

# Of a prompt that the server has counted, so much may be rendered as more when its turns are old.
_OLD_TURNS_ERROR = 0.005
# A number so far below what its prefix had is not taken for an anchor the first time.
_LOW_ERROR = 0.05
# More than this cannot be an addition only; taken for one, it would leave no room for the conversation.
_MAX_ADDED_RATIO = 1.5
# So sure must a reading be that it is called safe, and never closer than this to what new messages take.
_SURE_DEVIATIONS, _LEAST_GROWTH_ERROR = 3.0, 0.25


class Reading(NamedTuple):
    """Tokens of a request by all that is known; `factor` per raw token of its messages and tools."""

    tokens: float
    factor: float
    error_ratio: float


@dataclass(frozen=True, slots=True)
class Anchored:
    """Prompts that begin with an anchor.

    Args:
        calibrations: what their deployment has taught.
        basis: how they are counted, and their anchors were.
    """

    _calibrations: Calibrations
    _basis: str

    def read(self, raw: RawCount, prediction: Prediction, anchor: Anchor) -> Reading | None:
        """The count by the longest prefix that the server has counted; None where it cannot be trusted.

        Args:
            raw: our count.
            prediction: what the deployment's calibration says of it.
            anchor: the prefix.
        """
        new_tokens = raw.tokens - anchor.raw_tokens
        if raw.profile is not None and anchor.profile is not None:
            growth = self._growth(raw.profile.since(anchor.profile))
            tokens = anchor.prompt_tokens + growth.tokens
            # New text of another kind may take as much as the stand-in's own count, which errs high; what is not known
            # of it yet, no more than was feared before anything was.
            most_tokens = new_tokens * max(1.0, prediction.factor) * (1 + raw.error_ratio)
            wrong_tokens = max(
                min(_SURE_DEVIATIONS * growth.doubt_tokens, most_tokens - growth.tokens),
                _LEAST_GROWTH_ERROR * growth.tokens,
                new_tokens - growth.tokens,
            )
        elif new_tokens < 0:
            # The template leaves out what it rendered before; only a rendered prompt shows how much.
            tokens = anchor.prompt_tokens + (new_tokens if raw.exact else 0.0)
            wrong_tokens = -new_tokens * EXACT_ERROR
        else:
            new = self._predict_new(raw, new_tokens, anchor)
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
        return Reading(tokens, factor, error_ratio)

    def read_like_end(
        self, raw: RawCount, longest: tuple[Anchor, Reading], like: Anchor | None
    ) -> tuple[Anchor, Reading]:
        """The reading to go by where the longest prefix ends in another role than the request, and so may lack a part.

        Args:
            raw: our count.
            longest: the prefix and its reading.
            like: the longest prefix that ends in the request's role.
        """
        anchor, reading = longest
        if raw.profile is None:
            return longest
        if like is not None and like.profile is not None:
            growth = self._growth(raw.profile.since(like.profile))
            tokens = like.prompt_tokens + growth.tokens
            if abs(tokens - reading.tokens) <= _SURE_DEVIATIONS * growth.doubt_tokens + EXACT_ERROR * reading.tokens:
                return longest
            most = max(tokens + _SURE_DEVIATIONS * growth.doubt_tokens, reading.tokens)
            return like, Reading(tokens, tokens / raw.tokens, max(EXACT_ERROR, most / tokens - 1))
        whole = self._calibrations.of(self._basis).growths.predict_whole(raw.profile, raw.tools_tokens)
        if whole.tokens > reading.tokens + _SURE_DEVIATIONS * whole.doubt_tokens:
            most = whole.tokens + whole.doubt_tokens
            reading = reading._replace(error_ratio=max(reading.error_ratio, most / reading.tokens - 1))
        return anchor, reading

    def least_tokens(self, count: Count) -> float:
        """What the server has counted at least if it has counted all of the prompt; `count` may have no anchor."""
        anchor = count.anchor
        if anchor is None:
            return least_ratio_of(count) * solid_ratio(count) * count.tokens
        if count.profile is not None and anchor.profile is not None:
            growth = self._growth(count.profile.since(anchor.profile))
            least = (1 - _LOW_ERROR) * growth.tokens - _SURE_DEVIATIONS * growth.doubt_tokens
            return (1 - _OLD_TURNS_ERROR) * anchor.prompt_tokens + max(0.0, least) - count.allowance_tokens
        new_tokens = max(0.0, count.raw_tokens - anchor.raw_tokens)
        mix = anchor.new_mix(count.raw_tokens, count.mix)
        new = self._calibrations.of_new(self._basis).predict(new_tokens, mix, EXACT_ERROR)
        if new.calibrated or count.exact:
            least = new.factor * (1 - max(_LOW_ERROR, new.error_ratio))
        else:
            least = least_ratio(mix, new.error_ratio, is_sure=False)
        return (1 - _OLD_TURNS_ERROR) * anchor.prompt_tokens + new_tokens * least - count.allowance_tokens

    def learn(self, count: Count, prompt_tokens: int) -> None:
        """Learns what new messages take by themselves: a ratio of whole prompts has a server's additions in it.

        Args:
            count: of the whole prompt, which may have no anchor.
            prompt_tokens: the server's number for it.
        """
        if count.profile is not None:
            growths = self._calibrations.of(self._basis).growths
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
            self._calibrations.of_new(self._basis).add(new_tokens, 0.0, mix, new_prompt_tokens)

    def _growth(self, new: Profile) -> Growth:
        return self._calibrations.of(self._basis).growths.predict(new)

    def _predict_new(self, raw: RawCount, new_tokens: float, anchor: Anchor) -> Prediction:
        """What is known of messages behind an anchor, by such messages or else by whole prompts."""
        mix = anchor.new_mix(raw.tokens, raw.mix)
        new = self._calibrations.of_new(self._basis).predict(new_tokens, mix, raw.error_ratio)
        if new.calibrated:
            return new
        new = self._calibrations.of(self._basis).predict(new_tokens, mix, raw.error_ratio)
        return new._replace(error_ratio=max(new.error_ratio, raw.error_ratio))
