"""Corrects counts by the ratios that a deployment's server has shown (`prompt_tokens` of its answers).

A ratio is trusted only for requests like the ones that it was seen on: of the same mix of scripts, and as far as they
are not much longer. A deployment has one calibration for each way in which its prompts were counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from math import log, log2
from statistics import median
from typing import Any, NamedTuple

from litellm_compaction.tokens.growth import Growths
from litellm_compaction.tokens.media import MediaPrices
from litellm_compaction.tokens.samples import Samples, Stamps

# An exact count may still meet a server that renders a little differently.
EXACT_ERROR = 0.02
# Below this the template's constants decide the ratio, not the vocabulary.
TINY_TOKENS = 200
# No model is loaded with a context length below this, so nothing was cut from a shorter prompt.
MIN_TRUNCATED_TOKENS = 1024
_KEPT = 16
# Text that is a little shorter than we count looks like tools that take less than nothing.
_TOOLS_TOLERANCE = 0.2
_DOUBTS = 6
# If a server cuts prompts to its window or to a part of it, the longer one keeps a clearly smaller share: at 0.8,
# prompts that differ by a quarter are 5 % apart if the cut takes the same text from both.
_OTHER_SIZE, _SAME_RATIO, _MIN_CUT_RATIO = 1.25, 0.02, 0.5
_MIN_RATIO, MAX_RATIO = 0.3, 4.0
# One number moves the ratio of a model whose vocabulary and template we have by no more than this until another one
# confirms it: it may be a cut prompt's, or the difference of two large numbers that were not counted alike. A
# stand-in's stays within its bounds.
_KNOWN_ERROR, _STEP_RATIO = 0.05, 1.05
_STAND_IN_RATIOS = 0.5, 2.0
# Kinds of text differ by less at one server: a ratio so far from what it says when asked is another's, or was wrong.
_OTHER_RATIO = 1.5
# Scripts differ by a factor of 4 in how well a stand-in fits (families.py), so a sample with more of a foreign script
# than the request says nothing about it; one with less errs high.
_SAME_SHARE, _NEAR_SHARE = 0.05, 0.25
_FIRST_ERROR, _SETTLED_ERROR, _SETTLED_SAMPLES = 0.10, 0.03, 3
_NEW = "|new"
_MAX_BASES = 8
_VERSION = 2


class Prediction(NamedTuple):
    """A request's correction.

    Attributes:
        factor: true tokens per raw token, at least as much as in any like request of late.
        error_ratio: true count ≤ raw × factor × (1 + this).
        calibrated: samples of the same mix of scripts exist.
    """

    factor: float
    error_ratio: float
    calibrated: bool


class Mix(NamedTuple):
    """The parts of a text's tokens that stand-in vocabularies fit differently, 0–1.

    Attributes:
        other_share: beyond ASCII.
        digit_share: counted because every digit may stand alone.
    """

    other_share: float
    digit_share: float

    def says_nothing_of(self, request: Mix, more_share: float = _SAME_SHARE) -> bool:
        """Returns True if a sample of this mix holds more that stand-ins count too high, and so would mislead."""
        return any(mine > theirs + more_share for mine, theirs in zip(self, request, strict=True))

    def is_near(self, request: Mix) -> bool:
        """Returns True if a sample of this mix is about as good as one of the request's own."""
        return all(mine >= theirs - _NEAR_SHARE for mine, theirs in zip(self, request, strict=True))


PLAIN = Mix(other_share=0.0, digit_share=0.0)


class _Sample(NamedTuple):
    ratio: float
    raw_tokens: float
    other_share: float
    digit_share: float

    @property
    def mix(self) -> Mix:
        return Mix(self.other_share, self.digit_share)

    def confirms(self, other: _Sample) -> bool:
        """Returns True for the same ratio on a prompt of clearly different size, which no cut leaves."""
        is_other_size = max(self.raw_tokens, other.raw_tokens) >= _OTHER_SIZE * min(self.raw_tokens, other.raw_tokens)
        return is_other_size and abs(self.ratio / other.ratio - 1) <= _SAME_RATIO


def _sample(numbers: Sequence[float]) -> _Sample | None:
    if len(numbers) != len(_Sample._fields):
        return None
    sample = _Sample(*numbers)
    is_mix = all(0 <= share <= 1 for share in sample.mix)
    return sample if is_plausible(sample.ratio) and sample.raw_tokens > 0 and is_mix else None


def _extra(numbers: Sequence[float]) -> tuple[float, ...] | None:
    return tuple(numbers) if len(numbers) == 1 and abs(numbers[0]) < TINY_TOKENS * MAX_RATIO else None


def _tools(numbers: Sequence[float]) -> tuple[float, ...] | None:
    return tuple(numbers) if len(numbers) == 1 and 0 <= numbers[0] <= MAX_RATIO else None


class Calibration:
    """The last ratios of one deployment, longer prompts and tiny ones apart, and those that looked like a cut.

    The event loop teaches it while threads that count texts ask it.

    Attributes:
        media: what images and sound took, if no stand-in counts; of the whole deployment.
        growths: what new messages took, if a stand-in counts.
        kept: all that it has learned, by name.
        whole: the ratios of whole prompts, if this one is of new messages: a difference by itself proves little.
        since_us: when it was last found that this server counts otherwise than its samples said; 0 for never. Samples
            from before are another template's or server's, whichever process still has them.
    """

    def __init__(self, stamps: Stamps | None = None, media: MediaPrices | None = None) -> None:
        stamps = stamps or Stamps()
        self.media = media or MediaPrices(stamps)
        self.growths = Growths(stamps)
        self.since_us = 0
        self.whole: Samples[_Sample] | None = None
        self._stamps = stamps
        self.samples = Samples(stamps, _KEPT, _sample, digits=5)
        self._extra_tokens = Samples(stamps, _KEPT, _extra, digits=1)
        self._tools_ratios = Samples(stamps, _KEPT, _tools, digits=4)
        self._doubts: tuple[_Sample, ...] = ()
        self._was_low = False

    @property
    def kept(self) -> dict[str, Samples[Any]]:
        return {
            "samples": self.samples,
            "extra_tokens": self._extra_tokens,
            "tools_ratios": self._tools_ratios,
            "growths": self.growths.samples,
        }

    def predict(self, raw_tokens: float, mix: Mix, family_error: float) -> Prediction:
        """The correction of a request; `family_error`, the family's own, holds for all that no sample covers."""
        # The model's own vocabulary fits all scripts about equally: a sample with a little more of one misleads less.
        more_share = _NEAR_SHARE if family_error <= EXACT_ERROR else _SAME_SHARE
        everything = self.samples.values
        usable = [sample for sample in everything if not sample.mix.says_nothing_of(mix, more_share)]
        near = [sample for sample in usable if sample.mix.is_near(mix)]
        usable = like = near or usable
        if not usable:
            # A tiny prompt shows what the template adds, never how well the vocabulary fits.
            extra_tokens = max((0.0, *(tokens for (tokens,) in self._extra_tokens.values)))
            factor = 1 + extra_tokens / max(1.0, raw_tokens)
            # Text of another kind may not be so dear: a doubt, about which the server is asked.
            dearest = max((sample.ratio for sample in everything), default=1.0)
            has_agreed = family_error <= EXACT_ERROR and abs(factor - 1) <= EXACT_ERROR
            error = family_error if has_agreed else max(family_error, dearest / factor - 1)
            return Prediction(factor, error, calibrated=False)
        # Constants blow up the ratios of prompts far shorter than this one.
        usable = [sample for sample in usable if 4 * sample.raw_tokens >= raw_tokens] or usable
        ratios = [sample.ratio for sample in usable]
        others = like if self.whole is None else [*like, *self.whole.values]
        factor, is_confirmed = _believed(usable, family_error, others)
        dearest = max(ratios)
        spread = dearest - min(ratios)
        # The factor is already the highest seen; a wild spread says no more than the family's own bound does.
        spread_error = min(2 * spread, max(family_error, _FIRST_ERROR))
        error = max(_SETTLED_ERROR if len(usable) >= _SETTLED_SAMPLES else _FIRST_ERROR, spread_error)
        # A factor below one was seen on texts that the stand-in counts too high; the next text may be of another kind,
        # and the stand-in's own count errs high already. It may also be as dear as any was, believed or not.
        error = max(error, 1 / factor - 1, dearest * (1 + error) / factor - 1)
        covered = min(raw_tokens, max(sample.raw_tokens for sample in usable))
        if covered < raw_tokens:
            # An unconfirmed part may be text of another kind: there the family's own bound holds.
            bound = covered * factor * (1 + error) + (raw_tokens - covered) * max(1.0, dearest) * (1 + family_error)
            error = max(error, bound / (raw_tokens * factor) - 1)
        if family_error <= EXACT_ERROR and max(abs(factor - 1), abs(dearest - 1)) <= EXACT_ERROR:
            # The server agrees, so few samples are no reason for doubt.
            error = min(error, EXACT_ERROR)
        return Prediction(factor, error, calibrated=bool(near) and is_confirmed)

    def add(
        self,
        raw_tokens: float,
        allowance_tokens: float,
        mix: Mix,
        prompt_tokens: int,
        left_out_tokens: float = 0.0,
    ) -> float:
        """Learns a true count, unless its ratio is nonsense, and returns the ratio; arguments as in `Count`."""
        doubts = (-allowance_tokens, left_out_tokens)
        # Either all of it was really used or none: the reading that is nearest to what we knew.
        readings = [raw_tokens + doubt for doubt in doubts if 0.1 * raw_tokens < abs(doubt) and raw_tokens + doubt > 0]
        known = median([sample.ratio for sample in self.samples.values] or [1.0])
        ratio = min(
            (prompt_tokens / reading for reading in (*readings, raw_tokens)),
            key=lambda reading: abs(log(max(reading, 1e-9) / known)),
        )
        if not is_plausible(ratio):
            return ratio
        if min(prompt_tokens, raw_tokens) < TINY_TOKENS:
            self._extra_tokens.add((prompt_tokens - raw_tokens,))
        else:
            self.samples.add(_Sample(ratio, raw_tokens, *mix))
        return ratio

    def leave_behind(self, raw_tokens: float, mix: Mix, prompt_tokens: int) -> None:
        """Drops the ratios that the server's own count of a prompt contradicts; arguments as in `Count`."""
        if min(prompt_tokens, raw_tokens) < TINY_TOKENS:
            return
        ratio, known = prompt_tokens / raw_tokens, self.samples.values
        kept = [
            sample
            for sample in known
            if 1 / _OTHER_RATIO <= sample.ratio / ratio <= _OTHER_RATIO or sample.mix.says_nothing_of(mix)
        ]
        if len(kept) < len(known):
            # Under new stamps: the store, and other processes, still have all of them.
            self.since_us = self.samples.add(*kept) if kept else self._stamps.stamp()
            self.samples.forget_before(self.since_us)

    def explains(self, raw_tokens: float, allowance_tokens: float, mix: Mix, prompt_tokens: int) -> bool:
        """Learns a number so low that the prompt seems cut, and returns True, if it is how this server counts.

        A cut leaves about as much of every prompt, or takes about as much from it. A server that counts differently
        shows the same ratio on prompts of clearly different size, or on one that is too short to have been cut. A
        number that nothing confirms yet is kept as a doubt, for the next one.
        """
        doubt = _Sample(prompt_tokens / raw_tokens, raw_tokens, *mix)
        if doubt.ratio < _MIN_CUT_RATIO or allowance_tokens > 0.1 * raw_tokens:
            return False
        known = self.samples.values
        short = [sample for sample in known if TINY_TOKENS <= sample.raw_tokens < MIN_TRUNCATED_TOKENS]
        others = [
            other
            for other in (*short, *self._doubts)
            if doubt.confirms(other) and not other.mix.says_nothing_of(mix) and not mix.says_nothing_of(other.mix)
        ]
        if not others:
            self._doubts = (*self._doubts, doubt)[-_DOUBTS:]
            return False
        # The higher ratios are those of another template or server under this name.
        self.since_us = self.samples.add(*(*others, doubt)[-_KEPT:])
        self.samples.forget_before(self.since_us)
        self._doubts = ()
        return True

    def believes(self, prompt_tokens: int, least_tokens: float) -> bool:
        """Returns True if a number is the whole prompt's, with the part that the server had in its cache.

        Of numbers below `least_tokens`, the second in a row is believed: templates that render less of old turns look
        the same, once in a while.
        """
        believed = prompt_tokens >= least_tokens or self._was_low
        self._was_low = not believed
        return believed

    @property
    def tools_ratio(self) -> float | None:
        """True tokens per estimated one, of tools that the template drops; None if unknown."""
        return max((ratio for (ratio,) in self._tools_ratios.values), default=None)

    def note_tools(self, ratio: float, sure_tokens: float) -> None:
        """Learns a `tools_ratio`, seen in a prompt with `sure_tokens` besides the tools."""
        if -_TOOLS_TOLERANCE <= ratio <= MAX_RATIO and sure_tokens > 0:
            self._tools_ratios.add((max(0.0, round(ratio, 4)),))

    def as_json(self) -> dict[str, object]:
        return {"since": self.since_us} | {name: samples.as_json() for name, samples in self.kept.items()}

    def take_over(self, facts: object) -> None:
        """Adds what `as_json` once gave, and skips what it cannot have written."""
        if not isinstance(facts, dict):
            return
        for name, samples in self.kept.items():
            samples.merge(facts.get(name))
        self.since_us = max(self.since_us, self._stamps.see(facts.get("since")))
        self.samples.forget_before(self.since_us)

    @property
    def newest_us(self) -> int:
        """The time of the last lesson; 0 for never."""
        return max(samples.newest_us for samples in self.kept.values())

    def change_key(self) -> tuple[int, ...]:
        """Changes only if the next prediction changes noticeably: ratios by 1 %, lengths by a factor of 2."""
        samples = self.samples.values
        ratios = [sample.ratio for sample in samples] or [1.0]
        longest = max((sample.raw_tokens for sample in samples), default=1.0)
        shares = max((max(sample.mix) for sample in samples), default=0.0)
        return (
            min(len(samples), _SETTLED_SAMPLES),
            min(len(self._extra_tokens.values), 1),
            round(100 * log(max(ratios))),
            round(100 * log(min(ratios))),
            round(log2(longest)),
            round(shares / _NEAR_SHARE),
            round(20 * (self.tools_ratio if self.tools_ratio is not None else -1)),
            *self.growths.change_key(),
        )


def _believed(samples: Sequence[_Sample], family_error: float, others: Sequence[_Sample]) -> tuple[float, bool]:
    """The highest ratio of like requests that is more than a single number's, and if any number has confirmed it.

    Args:
        samples: of like requests, oldest first.
        family_error: as in `predict`.
        others: samples that may confirm them, of prompts of any size.
    """
    if family_error > _KNOWN_ERROR:
        least, most = _STAND_IN_RATIOS
        return min(max(least, *(sample.ratio for sample in samples)), most), True
    believed, reached = 1.0, list[float]()
    for sample in samples:
        step = min(max(sample.ratio, believed / _STEP_RATIO), believed * _STEP_RATIO)
        believed = sample.ratio if any(map(sample.confirms, others)) else step
        reached += [believed] if believed == sample.ratio else []
    return max([believed, *reached]), bool(reached)


def is_between_plausible(prompt_tokens: float, least_raw: float, most_raw: float) -> bool:
    """Returns True if a vocabulary can explain a number by any count between two."""
    return _MIN_RATIO * least_raw <= prompt_tokens <= MAX_RATIO * most_raw


def is_plausible(ratio: float) -> bool:
    """Returns True if a vocabulary can explain the ratio; if not, something else happened to the prompt."""
    return _MIN_RATIO <= ratio <= MAX_RATIO


class Calibrations:
    """A deployment's calibrations by counting method: one says nothing about others.

    Attributes:
        has_warned: the log says that the deployment's exact family is off.
        media: the prices of images, which are the server's, whatever counts the text.
    """

    def __init__(self, stamps: Stamps | None = None) -> None:
        self.has_warned = False
        self._stamps = stamps or Stamps()
        self.media = MediaPrices(self._stamps)
        self._by_method: dict[str, Calibration] = {}

    def of(self, counting_method: str) -> Calibration:
        """Of whole prompts."""
        found = self._by_method.get(counting_method)
        if found is None:
            # A thread that counts a text may ask for the same one in between.
            found = self._by_method.setdefault(counting_method, Calibration(self._stamps, self.media))
        return found

    def of_new(self, counting_method: str) -> Calibration:
        """Of new messages by themselves, without the server's additions to every prompt."""
        found = self.of(counting_method + _NEW)
        found.whole = self.of(counting_method).samples
        return found

    def change_key(self) -> tuple[object, ...]:
        """Changes only if the lessons have changed noticeably."""
        prices = (self.media.change_key(),) if self.media.samples.values else ()
        return (*prices, *sorted((counting_method, found.change_key()) for counting_method, found in self._learned()))

    def as_json(self) -> str:
        """All that was learned, for another process; no text of any conversation."""
        learned = {counting_method: found.as_json() for counting_method, found in self._learned()}
        return json.dumps({"version": _VERSION, "calibrations": learned, "media": self.media.samples.as_json()})

    def take_over(self, text: str) -> None:
        """Adds what another process has learned, and skips what `as_json` cannot have written."""
        try:
            facts = json.loads(text)
        except (RecursionError, ValueError):
            return
        if not isinstance(facts, dict) or facts.get("version") != _VERSION:
            return
        by_method = facts.get("calibrations")
        for counting_method, known in list(by_method.items())[:_MAX_BASES] if isinstance(by_method, dict) else ():
            self.of(counting_method).take_over(known)
        self.media.samples.merge(facts.get("media"))

    def _learned(self) -> list[tuple[str, Calibration]]:
        """Those that know something, as many as are kept, the newest last."""
        # A copy at once: a thread that counts a text may add a method meanwhile.
        known = list(self._by_method.items())
        learned = [(found.newest_us, counting_method, found) for counting_method, found in known if found.newest_us]
        return [
            (counting_method, found)
            for _, counting_method, found in sorted(learned, key=lambda each: each[:2])[-_MAX_BASES:]
        ]


def joined(kept: str, learned: str, *, clock: Callable[[], float] = time.time) -> str:
    """Merges two processes' knowledge of a deployment, each in the form of `Calibrations.as_json`.

    The same comes out in whatever order, and however often: of each kind of sample the newest stay, so that old ones
    fade. (Of more than eight ways to count, the oldest go; only then the order matters.)
    """
    both = Calibrations(Stamps(clock))
    both.take_over(kept)
    both.take_over(learned)
    return both.as_json()
