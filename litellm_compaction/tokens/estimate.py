"""An estimate is an interval: if both ends do not decide alike, the server is asked (`engine/servers.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, fsum
from typing import Any, NamedTuple, TypeAlias

from litellm_compaction.core.budget import MARGIN_MIN_TOKENS

# Entry i stands for the first i messages. Hashes of this process: 64 bit, seeded, and cached by the interpreter in each
# string, so that the second hook that counts a request gets them for nothing.
Prints: TypeAlias = tuple[int, ...]
_Ends: TypeAlias = tuple[float, float, float, float]

# Vocabularies and templates of strangers take up to twice what the family that a model is named after does.
UNCONFIRMED_RATIO = 2.0
# The most that an image takes whose price is unknown: what an encoder charges that has one price for all.
_UNPRICED_TOKENS = 1616
# So much of a counted prompt is rendered otherwise when its turns are old, by our templates or by others'.
_OLD_TURNS_RATIO, _OTHERS_TURNS_RATIO = 0.005, 0.03
# Of what is left out then.
_LEFT_OUT_ERROR = 0.02
# So much more may a part of a prompt take that the server has counted as a whole.
_SAME_TEXT_RATIO = 1.10
# Of a sum of fractions that is whole.
_NOISE_TOKENS = 1e-6


class Amounts(NamedTuple):
    """Tokens of a prompt by our own count: of text, what of it may not be in the server's, and of so many images."""

    text: float = 0.0
    optional: float = 0.0
    media: float = 0.0
    images: float = 0

    def since(self, told: Amounts) -> Amounts:
        """The amounts behind a prompt: text below 0 if the template leaves out what it has shown."""
        more = (max(0, after - before) for after, before in zip(self[1:], told[1:], strict=True))
        return Amounts(self.text - told.text, *more)


class Own(NamedTuple):
    """Our own count of a request, by which nothing of its server is known yet; sizes[i] belongs to messages[i].

    Attributes:
        optional_tokens: what a template may leave out, or a stand-in counts too many.
        media: media[i] is the part of sizes[i] that is an image, sound or a page; empty if none is.
        rendered: the chat template was; if not, constants stand for it.
        exact: vocabulary and template are known for everything in it.
        asks: the last message is the person's.
    """

    sizes: tuple[float, ...]
    tools_tokens: float = 0.0
    overhead_tokens: float = 0.0
    optional_tokens: float = 0.0
    media: tuple[float, ...] = ()
    images: int = 0
    rendered: bool = False
    exact: bool = False
    asks: bool = True

    @property
    def tokens(self) -> float:
        return self.overhead_tokens + self.tools_tokens + fsum(self.sizes)

    @property
    def amounts(self) -> Amounts:
        media = fsum(self.media)
        return Amounts(self.tokens - media, self.optional_tokens, media, self.images)


class Told(NamedTuple):
    """A server's number for a prompt, and our amounts for it; `doubt_tokens` is 0 for an answer's own number."""

    tokens: int
    amounts: Amounts
    doubt_tokens: float = 0.0


class Span(NamedTuple):
    """Tokens of a server for one of ours; `is_confirmed` if its own numbers have shown it."""

    low: float
    usual: float
    high: float
    is_confirmed: bool


_EXACTLY, _NOTHING = Span(1.0, 1.0, 1.0, is_confirmed=True), Own(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The tokens of one request: overhead_tokens + tools_tokens + sum(sizes); sizes[i] belongs to messages[i].

    Attributes:
        low, high: no server says less, or more.
        likely: the upper end for a server that counts as the model's family does, or as it has done so far.
        overhead_tokens: of the template, around the conversation.
        other_ratio: by how much sizes may be larger in a prompt that does not begin as this one does, at least 1.
        made_likely_ratio: so many times its estimate may a prompt take that is made of this one, before it is counted.
        text: what the server makes of text, by this prompt if it has counted that.
        rates: of what comes new: of text, and of our estimates of media.
        own: our count, made by a `method`; lessons hold only for counts that were made in the same way.
        prints: of the messages with tools and extras, to the letter; empty if it has none.
        told: the server's number for the longest prompt that it begins with, if any.
    """

    tokens: int
    low: int
    likely: int
    high: int
    sizes: tuple[int, ...]
    tools_tokens: int = 0
    overhead_tokens: int = 0
    other_ratio: float = 1.0
    made_likely_ratio: float = 1.0
    text: Span = _EXACTLY
    rates: tuple[Span, Span] = (_EXACTLY, _EXACTLY)
    own: Own = _NOTHING
    method: str = ""
    prints: Prints = ()
    told: Told | None = None

    @classmethod
    def exactly(cls, tokens: int, sizes: tuple[int, ...] | None = None, **more: object) -> Estimate:
        """The estimate of what needs none."""
        sizes = (tokens,) if sizes is None else sizes
        own = Own(sizes, overhead_tokens=tokens - sum(sizes), rendered=True, exact=True)
        return replace(cls(tokens=tokens, low=tokens, likely=tokens, high=tokens, sizes=sizes, own=own), **more)  # type: ignore[arg-type]

    @property
    def is_told(self) -> bool:
        """Returns True if an answer has counted exactly this prompt, or a tokenizer that answers have confirmed."""
        return self.is_counted and self.told is not None and not self.told.doubt_tokens

    @property
    def is_counted(self) -> bool:
        """Returns True if the server has counted exactly this prompt, by a protocol that nothing has confirmed, too."""
        return self.told is not None and self.told.amounts == self.own.amounts

    @property
    def fingerprint(self) -> int:
        """Of all that was counted; 0 if it has none."""
        return self.prints[-1] if self.prints else 0

    @property
    def other_likely_ratio(self) -> float:
        """The upper end of each of `sizes` in a prompt that does not begin as this one does."""
        return self.text.high / self.text.usual

    @property
    def likely_ratio(self) -> float:
        return self.likely / max(1, self.tokens)

    @property
    def unpriced_tokens(self) -> int:
        """So much more than ours may images take, as long as nothing has told their price."""
        return ceil(_unpriced(self.own.amounts.since(self.told.amounts if self.told else Amounts()), self.rates[1]))

    def surely_fits(self, window_tokens: int) -> bool:
        """Returns True if the prompt is shorter than its window even by the upper end."""
        return self.high + MARGIN_MIN_TOKENS <= window_tokens

    def with_part(self, part: Estimate | None) -> Estimate:
        """The estimate of a prompt that holds a part, not at its beginning: only the rest is in doubt besides."""
        if part is None:
            return self
        rest = self.own.amounts.since(part.own.amounts)
        ends = _with_more((part.low, part.tokens, part.likely, part.high), rest, *self.rates)
        low, tokens, likely, high = map(ceil, ends)
        if self.own.tokens <= part.own.tokens or self.is_told or high >= self.high:
            return self
        ratio = min(1.0, tokens / max(1, self.tokens))
        sizes, tools = tuple(int(size * ratio) for size in self.sizes), int(self.tools_tokens * ratio)
        changed: dict[str, Any] = {"tokens": tokens, "low": low, "likely": likely, "high": high}
        return replace(self, **changed, sizes=sizes, tools_tokens=tools, overhead_tokens=tokens - tools - sum(sizes))


def _with_more(begun: _Ends, new: Amounts, text: Span, price: Span) -> _Ends:
    """The ends of an estimate (low, usual, likely, high) of what has `begun`, with so much more behind or in it."""
    more = max(0.0, new.text)
    low, usual, likely, high = begun
    low += max(0.0, more - new.optional) * text.low + new.media * price.low
    usual += more * text.usual + new.media * price.usual
    added = more * text.high + new.media * price.high
    # What nothing has confirmed may be twice as much.
    doubt = 0.0 if text.is_confirmed else more * max(0.0, UNCONFIRMED_RATIO - text.high)
    doubt += _unpriced(new, price)
    return low, usual, likely + added, high + added + doubt


def _unpriced(new: Amounts, price: Span) -> float:
    return 0.0 if price.is_confirmed else max(0.0, new.images * _UNPRICED_TOKENS - new.media * price.high)


def estimated(own: Own, told: Told | None, text: Span, price: Span, method: str, prints: Prints) -> Estimate:
    """The estimate of a request by what its server has `told` of its beginning, and makes of text and of media."""
    base = told or Told(0, Amounts())
    new = own.amounts.since(base.amounts)
    left_out = min(0.0, new.text) if own.rendered else 0.0
    is_same = base.amounts == own.amounts
    old_turns_ratio = 0.0 if is_same else _OLD_TURNS_RATIO if own.rendered else _OTHERS_TURNS_RATIO
    spread = (base.doubt_tokens or base.tokens * old_turns_ratio) - _LEFT_OUT_ERROR * left_out
    begun = base.tokens + left_out
    ends = begun - spread, begun, begun + spread, begun + spread
    low, usual, likely, high = _with_more(ends, new, text, price)
    media = own.amounts.media
    factor = max(0.0, usual - media * price.usual) / max(1.0, own.tokens - media)
    parts = zip(own.sizes, own.media or (0.0,) * len(own.sizes), strict=True)
    sizes = tuple(int((size - of_media) * factor + of_media * price.usual) for size, of_media in parts)
    # What is made of a prompt that the server has counted has its text in it.
    ratio, share = text.high / text.usual, min(1.0, base.amounts.text / max(1.0, own.amounts.text))
    ratio += share * (min(ratio, _SAME_TEXT_RATIO) - ratio)
    made = Span(factor / ratio, factor, factor * ratio, text.is_confirmed) if is_same and factor > 0 else text
    tools_tokens = int(own.tools_tokens * factor)
    tokens = max(ceil(usual - _NOISE_TOKENS), tools_tokens + sum(sizes))
    return Estimate(
        tokens=tokens,
        low=max(0, min(int(low), tokens)),
        likely=max(ceil(likely - _NOISE_TOKENS), tokens),
        high=max(ceil(high - _NOISE_TOKENS), tokens),
        sizes=sizes,
        tools_tokens=tools_tokens,
        overhead_tokens=tokens - tools_tokens - sum(sizes),
        other_ratio=max(1.0, made.usual / max(factor, 0.01)),
        made_likely_ratio=ratio,
        text=made,
        rates=(text, price),
        own=own,
        method=method,
        prints=prints,
        told=told,
    )
