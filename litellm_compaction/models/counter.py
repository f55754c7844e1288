"""How many tokens a request takes, message by message, and how far that can be from the truth.

Called by the engine on every request, and with the server's `prompt_tokens` after every answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

from litellm_compaction.core.messages import Request
from litellm_compaction.models.calibration import PLAIN, TINY_TOKENS, Calibration, Mix, Prediction, is_plausible
from litellm_compaction.models.families import Family
from litellm_compaction.models.measures import Item, Measure, Measures
from litellm_compaction.models.rendering import Rendered, render_message, tools_text

# Wildcard deployments get their model names from clients, so the number of calibrations needs an end.
_MAX_TARGETS = 4096
# Nobody loads a model with a context length below this, so nothing was cut from a shorter prompt.
_MIN_TRUNCATED_TOKENS = 1024
# The part of a family's instructions for tools that a template may do without.
_TOOLS_ALLOWANCE_RATIO = 0.5
# Characters beyond ASCII take about three times as many tokens of cl100k as others (12 languages, 2026-11).
_OTHER_WEIGHT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The tokens of one request.

    Attributes:
        tokens: overhead_tokens + tools_tokens + sum(sizes).
        sizes: sizes[i] belongs to messages[i].
        tools_tokens: the schemas and the instructions that come with them.
        overhead_tokens: what the template puts around the conversation.
        error_ratio: true count ≤ tokens × (1 + error_ratio).
        exact: the vocabulary is the model's own and the template is known for everything in this request.
        raw_tokens: the count before calibration.
        allowance_tokens: the part of raw_tokens that may be rendered as far less: images, reasoning of older turns.
        mix: what the text consists of: beyond ASCII, stand-ins count up to 4 times too much, of digits up to 3 times.
        calibrated: the server has confirmed like requests.
    """

    tokens: int
    sizes: tuple[int, ...]
    tools_tokens: int
    overhead_tokens: int
    error_ratio: float
    exact: bool
    raw_tokens: float
    allowance_tokens: float = 0.0
    mix: Mix = PLAIN
    calibrated: bool = False

    @property
    def margin_tokens(self) -> int:
        """Room to keep free because the count may be too low: 64 tokens, 2 %, or as far as it can be wrong."""
        return max(64, ceil(self.tokens * max(0.02, self.error_ratio)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A true count that the family does not explain: `ratio` is `actual` / `expected`."""

    expected: int
    actual: int
    ratio: float


class TokenCounter:
    """Counts for any number of deployments, and remembers what their servers counted."""

    def __init__(self) -> None:
        self._measures = Measures()
        self._calibrations: OrderedDict[str, Calibration] = OrderedDict()
        self._warned: set[str] = set()

    async def count(self, target_key: str, family: Family, request: Request) -> Count:
        """The tokens of a request. Never raises on its content.

        Args:
            target_key: the deployment, for its calibration.
        """
        rendered = [render_message(message, family) for message in request.messages]
        items = [Item(part.texts, part.form) for part in rendered]
        if request.tools:
            items.append(Item((tools_text(request.tools),), "plain" if family.exact else "indented"))
        measures = await self._measures.get(family.encoding, items)
        raw_texts = [_raw_tokens(measure, family) for measure in measures]

        raw_sizes = [part.fixed_tokens + raw for part, raw in zip(rendered, raw_texts, strict=False)]
        allowance = sum(map(_allowance, rendered, measures, raw_texts))
        raw_tools = 0.0
        if request.tools:
            around = family.tools_tokens + family.tool_tokens * len(request.tools)
            raw_tools = raw_texts[-1] + around
            allowance += around * _TOOLS_ALLOWANCE_RATIO
        raw_overhead = family.request_tokens
        if not (request.messages and request.messages[0].is_system):
            raw_overhead += family.default_system_tokens
            allowance += family.default_system_tokens
        raw_tokens = raw_overhead + raw_tools + sum(raw_sizes)

        mix = _mix(measures, family)
        prediction = self._predict(target_key, raw_tokens, mix, family)
        sizes = tuple(ceil(size * prediction.factor) for size in raw_sizes)
        tools_tokens = ceil(raw_tools * prediction.factor)
        overhead_tokens = ceil(raw_overhead * prediction.factor)
        return Count(
            tokens=overhead_tokens + tools_tokens + sum(sizes),
            sizes=sizes,
            tools_tokens=tools_tokens,
            overhead_tokens=overhead_tokens,
            error_ratio=prediction.error_ratio,
            exact=family.exact and allowance == 0,
            raw_tokens=raw_tokens,
            allowance_tokens=allowance,
            mix=mix,
            calibrated=prediction.calibrated,
        )

    async def count_text(self, target_key: str, family: Family, text: str) -> int:
        """Calibrated tokens of a text by itself, without any template around it."""
        (measure,) = await self._measures.get(family.encoding, [Item((text,))])
        return self._text_tokens(target_key, family, measure)

    def text_counter(self, target_key: str, family: Family) -> Callable[[str], int]:
        """`count_text` for pure callers: counts in the caller's thread, about 0.1 s per MB when the text is new."""

        def count_text_now(text: str) -> int:
            (measure,) = self._measures.get_now(family.encoding, [Item((text,))])
            return self._text_tokens(target_key, family, measure)

        return count_text_now

    def learn(self, target_key: str, count: Count, prompt_tokens: int) -> Deviation | None:
        """Takes over what the server counted for a request that `count` belongs to.

        Not learned: no number (≤ 0), a ratio that no vocabulary explains, and a prompt that was probably cut.

        Returns:
            A deviation where the number was refused, and the first time that an exact family is off by more than 5 %.
        """
        if prompt_tokens <= 0 or count.raw_tokens <= 0:
            return None
        deviation = Deviation(
            expected=round(count.raw_tokens), actual=prompt_tokens, ratio=prompt_tokens / count.raw_tokens
        )
        if self.is_suspicious(count, prompt_tokens):
            return deviation
        ratio = self._calibration(target_key).add(count.raw_tokens, count.allowance_tokens, count.mix, prompt_tokens)
        if not is_plausible(ratio):
            return deviation
        off = count.exact and prompt_tokens >= TINY_TOKENS and abs(deviation.ratio - 1) > 0.05
        if not off or target_key in self._warned:
            return None
        self._warned.add(target_key)
        return deviation

    def is_suspicious(self, count: Count, prompt_tokens: int) -> bool:
        """Whether the server's number is so far below ours that it has probably cut the prompt."""
        solid_ratio = 1 - count.allowance_tokens / count.raw_tokens if count.raw_tokens > 0 else 1.0
        solid_tokens = count.tokens * solid_ratio
        if prompt_tokens <= 0 or solid_tokens < _MIN_TRUNCATED_TOKENS:
            return False
        if count.calibrated or count.exact:
            least_ratio = 1 - max(0.15, 3 * count.error_ratio)
        else:
            # Beyond ASCII a stand-in counts up to 4 times too much, without anything being cut.
            least_ratio = 0.55 - 0.35 * count.mix.other_share - 0.25 * count.mix.digit_share
        return prompt_tokens < least_ratio * solid_tokens

    def _text_tokens(self, target_key: str, family: Family, measure: Measure) -> int:
        raw_tokens = _raw_tokens(measure, family)
        return ceil(raw_tokens * self._predict(target_key, raw_tokens, _mix([measure], family), family).factor)

    def _predict(self, target_key: str, raw_tokens: float, mix: Mix, family: Family) -> Prediction:
        return self._calibration(target_key).predict(raw_tokens, mix, family.error_ratio)

    def _calibration(self, target_key: str) -> Calibration:
        found = self._calibrations.get(target_key)
        if found is None:
            found = self._calibrations[target_key] = Calibration()
            if len(self._calibrations) > _MAX_TARGETS:
                forgotten, _ = self._calibrations.popitem(last=False)
                self._warned.discard(forgotten)
        return found


def _raw_tokens(measure: Measure, family: Family) -> float:
    return measure.tokens * family.text_ratio + (measure.digit_tokens if family.single_digits else 0)


def _allowance(part: Rendered, measure: Measure, raw_tokens: float) -> float:
    """Upper limits in a message: images, and reasoning, which most templates leave out of older turns."""
    return part.allowance_tokens + raw_tokens * len(part.reasoning) / max(1, measure.chars)


def _mix(measures: Iterable[Measure], family: Family) -> Mix:
    chars = other_chars = digit_tokens = 0
    tokens = 0.0
    for measure in measures:
        chars += measure.chars
        other_chars += measure.other_chars
        digit_tokens += measure.digit_tokens
        tokens += _raw_tokens(measure, family)
    weighted = _OTHER_WEIGHT * other_chars
    return Mix(
        other_share=weighted / (weighted + chars - other_chars) if other_chars else 0.0,
        digit_share=digit_tokens / tokens if family.single_digits and digit_tokens else 0.0,
    )
