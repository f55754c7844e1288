"""Tokens of a request by its family's formula: where no chat template is known, or it refuses the request.

Called by `counting.py`; `counter.py` uses its parts for texts by themselves. Errs on the high side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from litellm_compaction.core.messages import Request
from litellm_compaction.models.calibration import PLAIN, Mix
from litellm_compaction.models.families import FORMULA_ERROR, HEURISTIC, Family
from litellm_compaction.models.growth import Profile
from litellm_compaction.models.measures import Item, Measure, Measures
from litellm_compaction.models.prompts import has_system
from litellm_compaction.models.raw_count import RawCount
from litellm_compaction.models.rendering import Rendered, render_message, tools_text

# The part of a family's instructions for tools that a template may do without.
_TOOLS_ALLOWANCE_RATIO = 0.5
# Characters beyond ASCII take about three times as many tokens of cl100k as others (12 languages, 2026-11).
_OTHER_WEIGHT = 3


async def by_formula(family: Family, request: Request, measures: Measures) -> RawCount:
    """The tokens of a request: its texts by the family's vocabulary, and constants for what stands around them.

    Args:
        family: counts them.
        request: what is sent.
        measures: of texts, remembered.
    """
    rendered = [render_message(message, family) for message in request.messages]
    items = [Item(part.texts, part.form) for part in rendered]
    if request.tools:
        items.append(tools_item(request, family))
    measured = await measures.get(family.vocabulary, items)
    raw_texts = [raw_tokens(measure, family) for measure in measured]
    sizes = [part.fixed_tokens + raw for part, raw in zip(rendered, raw_texts, strict=False)]
    allowance = sum(map(_allowance, rendered, measured, raw_texts))
    tools_tokens = doubtful_tools_tokens = 0.0
    if request.tools:
        tools_tokens = tools_estimate(request, family, measured[-1])
        around = tools_tokens - raw_texts[-1]
        # OpenAI's models have no template that could leave them out.
        doubtful_tools_tokens = 0.0 if family.name == "gpt" else tools_tokens
        allowance += around * _TOOLS_ALLOWANCE_RATIO
    overhead = family.request_tokens
    is_stand_in = not family.owns_vocabulary and family.vocabulary != HEURISTIC.vocabulary
    if not has_system(request):
        overhead += family.default_system_tokens
        allowance += family.default_system_tokens
    return RawCount(
        sizes=tuple(sizes),
        tools_tokens=tools_tokens,
        overhead_tokens=overhead,
        allowance_tokens=allowance,
        error_ratio=max(FORMULA_ERROR, family.error_ratio) if family.template else family.error_ratio,
        rendered=False,
        exact=family.exact and not family.template and allowance == 0,
        mix=mix_of(measured, family),
        profile=_profile(request, rendered, measured) if is_stand_in else None,
        media=tuple(part.allowance_tokens for part in rendered) if any(map(_has_media, rendered)) else (),
        doubtful_tools_tokens=doubtful_tools_tokens,
    )


def tools_item(request: Request, family: Family) -> Item:
    """A request's tools, to be measured."""
    return Item((tools_text(request.tools),), "plain" if family.name in ("gpt", "heuristic") else "indented")


def tools_estimate(request: Request, family: Family, measure: Measure) -> float:
    """What tools take where a template does not say it, at the upper end.

    Args:
        request: has them.
        family: counts them.
        measure: of its `tools_item`.
    """
    return raw_tokens(measure, family) + family.tools_tokens + family.tool_tokens * len(request.tools)


def raw_tokens(measure: Measure, family: Family) -> float:
    """Tokens of a text in the family's vocabulary, or about as many by its stand-in."""
    return measure.tokens * family.text_ratio + (measure.digit_tokens if family.single_digits else 0)


def mix_of(measures: Iterable[Measure], family: Family) -> Mix:
    """What texts consist of; plain where the vocabulary is the model's own, which fits all of them."""
    if family.owns_vocabulary:
        return PLAIN
    chars = other_chars = digit_tokens = 0
    tokens = 0.0
    for measure in measures:
        chars += measure.chars
        other_chars += measure.other_chars
        digit_tokens += measure.digit_tokens
        tokens += raw_tokens(measure, family)
    weighted = _OTHER_WEIGHT * other_chars
    return Mix(
        other_share=weighted / (weighted + chars - other_chars) if other_chars else 0.0,
        digit_share=digit_tokens / tokens if family.single_digits and digit_tokens else 0.0,
    )


def _profile(request: Request, rendered: Sequence[Rendered], measures: Sequence[Measure]) -> Profile:
    """What messages consist of; measures[i] belongs to messages[i]."""
    profile = Profile(messages=len(rendered))
    for message, part, measure in zip(request.messages, rendered, measures, strict=False):
        per_char = measure.tokens / max(1, measure.chars)
        one = Profile(
            tokens=measure.tokens,
            digit_tokens=measure.digit_tokens,
            other_chars=measure.other_chars,
            calls=len(message.calls),
            said_tokens=len(message.text) * per_char if message.calls else 0.0,
            reasoning_tokens=len(part.reasoning) * per_char,
            media_tokens=part.allowance_tokens,
        )
        profile = profile.plus(one)
    return profile


def _has_media(part: Rendered) -> bool:
    return part.allowance_tokens > 0


def _allowance(part: Rendered, measure: Measure, tokens: float) -> float:
    """Upper limits in a message: images, and reasoning, which most templates leave out of older turns."""
    return part.allowance_tokens + tokens * len(part.reasoning) / max(1, measure.chars)
