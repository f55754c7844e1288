"""An estimate is an interval: `low` ≤ the server's number ≤ `high`, and `tokens` is the best guess.

Whoever decides by a count asks if both ends decide alike, and has the server asked if not (`engine/asking.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple, TypeAlias

# Entry i stands for the first i messages. Hashes of this process: 64 bit, seeded, and cached by the interpreter in each
# string, so that the second hook that counts a request gets them for nothing.
Prints: TypeAlias = tuple[int, ...]

# Vocabularies and templates of strangers take up to twice what the family that a model is named after does.
_UNCONFIRMED_RATIO = 2.0
# The most that an image takes whose price is unknown: what an encoder charges that has one price for all.
_UNPRICED_TOKENS = 1616
# Of a prompt that was counted, so much is rendered otherwise when its turns are old; and of what is left out then.
_OLD_TURNS_RATIO, _LEFT_OUT_ERROR = 0.005, 0.02
# So much more may a part of a prompt take that the server has counted as a whole.
_SAME_TEXT_RATIO = 1.10


class Amounts(NamedTuple):
    """Parts of a prompt by our own count.

    Attributes:
        text: tokens of all but media.
        optional: those of them that a template may leave out, or that a stand-in counts too many.
        media: tokens of images, sound and pages, by estimate.
        images: how many these are.
    """

    text: float = 0.0
    optional: float = 0.0
    media: float = 0.0
    images: float = 0

    def since(self, told: Amounts) -> Amounts:
        """The amounts of what comes after a prompt: text below 0 if the template leaves out what it has shown."""
        return Amounts(
            self.text - told.text, *(max(0, after - before) for after, before in zip(self[1:], told[1:], strict=True))
        )


class Own(NamedTuple):
    """Our own count of a request, by which nothing of its server is known yet.

    Attributes:
        sizes: sizes[i] belongs to messages[i].
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
        return self.overhead_tokens + self.tools_tokens + sum(self.sizes)

    @property
    def amounts(self) -> Amounts:
        media = sum(self.media)
        return Amounts(self.tokens - media, self.optional_tokens, media, self.images)

    def sizes_by(self, factor: float, price: float) -> tuple[int, ...]:
        """The sizes if the server takes so many times our tokens of text and of media."""
        parts = zip(self.sizes, self.media or (0.0,) * len(self.sizes), strict=True)
        return tuple(int((size - media) * factor + media * price) for size, media in parts)


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
    """The tokens of one request: overhead_tokens + tools_tokens + sum(sizes).

    One value of many numbers, since they are true of one moment only: what its server tells next changes all of them.

    Attributes:
        low, high: no server says less, or more.
        likely: the upper end for a server that counts as the model's family does, or as it has done so far.
        sizes: sizes[i] belongs to messages[i].
        tools_tokens: the schemas and the instructions that come with them.
        overhead_tokens: of the template, around the conversation.
        other_ratio: by how much sizes may be larger in a prompt that does not begin as this one does, at least 1.
        made_likely_ratio: so many times its estimate may a prompt take that is made of this one, before it is counted.
        text: what the server makes of text.
        own: our count, before anything was known of the server.
        method: of our count; lessons hold only for counts made in the same way.
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
    own: Own = _NOTHING
    method: str = ""
    prints: Prints = ()
    told: Told | None = None

    @classmethod
    def exactly(cls, tokens: int, sizes: tuple[int, ...] | None = None, **more: object) -> Estimate:
        """The estimate of what needs none; all of it is one message's without `sizes`."""
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

    def with_part(self, part: Estimate) -> Estimate:
        """The estimate of a prompt that holds all of another which the server has counted: only the rest is in doubt.

        Unlike `told` it need not begin with that.
        """
        base, own_base = (self.told.tokens, self.told.amounts.text) if self.told else (0, 0.0)
        rest = self.own.tokens - part.own.tokens
        if rest <= 0 or self.is_told:
            return self
        share = rest / max(1.0, self.own.tokens - own_base)
        high = ceil(part.high + share * (self.high - base))
        if part.tokens + share * (self.high - base) >= self.high:
            return self
        tokens = ceil(part.tokens + share * (self.tokens - base))
        ratio = min(1.0, tokens / max(1, self.tokens))
        sizes, tools = tuple(int(size * ratio) for size in self.sizes), int(self.tools_tokens * ratio)
        return replace(
            self,
            tokens=tokens,
            low=int(part.low + share * max(0, self.low - base)),
            likely=ceil(part.likely + share * (self.likely - base)),
            high=high,
            sizes=sizes,
            tools_tokens=tools,
            overhead_tokens=tokens - tools - sum(sizes),
        )


def estimated(own: Own, told: Told | None, text: Span, price: Span) -> Estimate:
    """The estimate of a request by all that is known of its server.

    Args:
        own: our count.
        told: the server's number for a prompt that it begins with.
        text: what the server makes of text.
        price: what it makes of our estimates of media.
    """
    base, spread, new, made_ratio = 0.0, 0.0, own.amounts, text.high / text.usual
    if told is not None:
        new, base = own.amounts.since(told.amounts), float(told.tokens)
        is_same = told.amounts == own.amounts
        left_out = min(0.0, new.text) if own.rendered else 0.0
        spread = (told.doubt_tokens or (0.0 if is_same else base * _OLD_TURNS_RATIO)) - _LEFT_OUT_ERROR * left_out
        base += left_out
        # What is made of a prompt that the server has counted has its text in it.
        share = min(1.0, told.amounts.text / max(1.0, own.amounts.text))
        made_ratio += share * (min(made_ratio, _SAME_TEXT_RATIO) - made_ratio)
    more = max(0.0, new.text)
    usual = base + more * text.usual + new.media * price.usual
    low = base - spread + max(0.0, more - new.optional) * text.low + new.media * price.low
    likely = base + spread + more * text.high + new.media * price.high
    # What nothing has confirmed may be twice as much.
    high = likely + more * (max(text.high, 0 if text.is_confirmed else _UNCONFIRMED_RATIO) - text.high)
    if not price.is_confirmed:
        high += max(0.0, new.images * _UNPRICED_TOKENS - new.media * price.high)
    media = own.amounts.media
    factor = max(0.0, usual - media * price.usual) / max(1.0, own.tokens - media)
    if told is not None and is_same and factor > 0:
        text = Span(factor / made_ratio, factor, factor * made_ratio, is_confirmed=text.is_confirmed)
    sizes, tools_tokens = own.sizes_by(factor, price.usual), int(own.tools_tokens * factor)
    tokens = max(ceil(usual - 1e-6), tools_tokens + sum(sizes))
    return Estimate(
        tokens=tokens,
        low=max(0, min(int(low), tokens)),
        likely=max(ceil(likely - 1e-6), tokens),
        high=max(ceil(high - 1e-6), tokens),
        sizes=sizes,
        tools_tokens=tools_tokens,
        overhead_tokens=tokens - tools_tokens - sum(sizes),
        other_ratio=max(1.0, text.usual / max(factor, 0.01)),
        made_likely_ratio=made_ratio,
        text=text,
        own=own,
        told=told,
    )
