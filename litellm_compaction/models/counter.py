"""How many tokens a request takes, message by message, and how far that can be from the truth.

Called by the engine on every request, and with the server's `prompt_tokens` after every answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from litellm_compaction.core.messages import Request
from litellm_compaction.models.calibration import PLAIN, TINY_TOKENS, Calibration, Mix, Prediction, is_plausible
from litellm_compaction.models.counting import EXACT_ERROR, Counting, mix_of, raw_tokens
from litellm_compaction.models.families import Family
from litellm_compaction.models.measures import Item, Measure
from litellm_compaction.models.usable import usable, usable_soon

# Wildcard deployments get their model names from clients, so the number of calibrations needs an end.
_MAX_TARGETS = 4096
# Nobody loads a model with a context length below this, so nothing was cut from a shorter prompt.
_MIN_TRUNCATED_TOKENS = 1024


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
        rendered: the template was rendered; otherwise a formula stands for it.
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
    rendered: bool = False
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
        self._counting = Counting()
        # What was learned of rendered prompts says nothing about the formula, and the reverse.
        self._calibrations: OrderedDict[tuple[str, bool], Calibration] = OrderedDict()
        self._warned: set[str] = set()

    async def count(self, target_key: str, family: Family, request: Request) -> Count:
        """The tokens of a request. Never raises on its content.

        Args:
            target_key: the deployment, for its calibration.
            family: of its model.
            request: what is sent to it.
        """
        raw = await self._counting.count(await usable_soon(family), request)
        prediction = self._predict(target_key, raw.tokens, raw.mix, raw.error_ratio, rendered=raw.rendered)
        sizes = tuple(ceil(size * prediction.factor) for size in raw.sizes)
        tools_tokens = ceil(raw.tools_tokens * prediction.factor)
        overhead_tokens = ceil(raw.overhead_tokens * prediction.factor)
        return Count(
            tokens=overhead_tokens + tools_tokens + sum(sizes),
            sizes=sizes,
            tools_tokens=tools_tokens,
            overhead_tokens=overhead_tokens,
            error_ratio=prediction.error_ratio,
            exact=raw.exact and raw.allowance_tokens == 0,
            raw_tokens=raw.tokens,
            rendered=raw.rendered,
            allowance_tokens=raw.allowance_tokens,
            mix=raw.mix,
            calibrated=prediction.calibrated,
        )

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
        ratio = self._calibration(target_key, count.rendered).add(
            count.raw_tokens, count.allowance_tokens, count.mix, prompt_tokens
        )
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
        tokens, rendered = raw_tokens(measure, family), bool(family.template)
        mix = mix_of([measure], family)
        factor = self._predict(target_key, tokens, mix, family.error_ratio, rendered=rendered, is_text=True).factor
        return ceil(tokens * factor)

    def _predict(
        self, target_key: str, tokens: float, mix: Mix, error_ratio: float, *, rendered: bool, is_text: bool = False
    ) -> Prediction:
        prediction = self._calibration(target_key, rendered).predict(tokens, mix, error_ratio)
        if rendered and is_text and not prediction.calibrated:
            # What a server injects into prompts says nothing of a text by itself.
            return prediction._replace(factor=1.0)
        if error_ratio <= EXACT_ERROR and abs(prediction.factor - 1) <= EXACT_ERROR:
            # The server agrees, so few samples are no reason for doubt.
            return prediction._replace(error_ratio=min(prediction.error_ratio, EXACT_ERROR))
        return prediction

    def _calibration(self, target_key: str, rendered: bool) -> Calibration:
        found = self._calibrations.get((target_key, rendered))
        if found is None:
            found = self._calibrations[target_key, rendered] = Calibration()
            if len(self._calibrations) > _MAX_TARGETS:
                (forgotten, _), _ = self._calibrations.popitem(last=False)
                self._warned.discard(forgotten)
        return found
