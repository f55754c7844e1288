"""Counts as values: a request's tokens before any calibration and after it, and the bounds of the server's number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple, TypeAlias

from litellm_compaction.tokens.calibration import PLAIN, Mix
from litellm_compaction.tokens.growth import Profile

# Less of the estimate is the server's own way to begin a prompt.
_LEFT_OUT_RATIO = 0.02
_PRICED_ERROR, _OTHER_ERROR = 0.02, 0.05
# Of a prompt that the server has counted, so much may be rendered as less when its turns are old.
_OLD_TURNS_RATIO = 0.005
_OTHER_DOUBT, _DIGIT_DOUBT = 0.35, 0.25
# By so much a stand-in's margin is wider than it was ever seen to count too much.
_LEAST_DOUBT, _SAFE_ERROR = 0.05, 0.10

# Foreign vocabularies and templates counted 0.7 to 2.0 times what the family named by the model does (issue 25).
_UNCONFIRMED_ERROR = 1.0

# Entry i stands for the first i messages. Hashes of this process: 64 bit, seeded, and cached by the interpreter in each
# string, so that the second hook that counts a request gets them for nothing.
Fingerprints: TypeAlias = tuple[int, ...]


class Anchor(NamedTuple):
    """A server's number for a prompt, beside our count (as in `Count`).

    Attributes:
        prompt_tokens: the server's number.
        role: of the last message: some templates leave out a part of the prompt that depends on it (Mistral Nemo's and
            v3's the system message, if the last one is a tool's).
        is_sure: the server was asked for the number, which holds however far it is from ours.
    """

    prompt_tokens: int
    raw_tokens: float
    mix: Mix
    profile: Profile | None = None
    role: str = ""
    media_tokens: float = 0.0
    is_sure: bool = False
    left_out_tokens: float = 0.0

    @classmethod
    def of(cls, count: Count, prompt_tokens: int, *, is_sure: bool) -> Anchor:
        return cls(
            prompt_tokens,
            count.raw_tokens,
            count.mix,
            count.profile,
            count.role,
            count.media_tokens,
            is_sure,
            count.left_out_tokens,
        )

    @property
    def text_tokens(self) -> float:
        return self.raw_tokens - self.media_tokens

    def new_mix(self, raw_tokens: float, mix: Mix) -> Mix:
        """The mix of the rest of a longer prompt, from that prompt's size and mix."""
        new_tokens = raw_tokens - self.raw_tokens
        if new_tokens <= 0:
            return mix
        return Mix(
            *(
                min(1.0, max(0.0, (whole * raw_tokens - old * self.raw_tokens) / new_tokens))
                for whole, old in zip(mix, self.mix, strict=True)
            )
        )


class RawCount(NamedTuple):
    """Tokens before calibration; the fields are those of `Count`.

    Attributes:
        exact: nothing in them is an estimate.
        media: of images, sound and pages, by estimate; media[i] is a part of sizes[i]; empty if there are none.
    """

    sizes: tuple[float, ...]
    tools_tokens: float
    overhead_tokens: float
    allowance_tokens: float
    error_ratio: float
    rendered: bool
    exact: bool
    mix: Mix
    profile: Profile | None = None
    media: tuple[float, ...] = ()
    doubtful_tools_tokens: float = 0.0
    left_out_tokens: float = 0.0

    @property
    def tokens(self) -> float:
        return self.overhead_tokens + self.tools_tokens + sum(self.sizes)

    @property
    def media_tokens(self) -> float:
        return sum(self.media)

    @property
    def text_tokens(self) -> float:
        return self.tokens - self.media_tokens

    def with_extras(self, tokens: float) -> RawCount:
        """Adds text around the messages that a server may render, or may not."""
        return self._replace(
            overhead_tokens=self.overhead_tokens + tokens,
            allowance_tokens=self.allowance_tokens + tokens,
            error_ratio=max(self.error_ratio, _OTHER_ERROR),
            exact=False,
        )

    def with_tools_priced(self, ratio: float, *, exact: bool) -> RawCount:
        """Prices tools by the ratio of their estimate that a server has shown; `exact`: the rest is."""
        is_left_out = ratio <= _LEFT_OUT_RATIO
        return self._replace(
            tools_tokens=0.0 if is_left_out else self.tools_tokens * ratio,
            doubtful_tools_tokens=0.0,
            exact=exact and is_left_out,
            error_ratio=min(self.error_ratio, _PRICED_ERROR) if is_left_out else max(self.error_ratio, _OTHER_ERROR),
        )

    def sizes_by(self, factor: float, media_factor: float) -> list[float]:
        if not self.media:
            return [size * factor for size in self.sizes]
        return [
            (size - media) * factor + media * media_factor for size, media in zip(self.sizes, self.media, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The tokens of one request.

    Attributes:
        tokens: overhead_tokens + tools_tokens + sum(sizes).
        sizes: sizes[i] belongs to messages[i].
        tools_tokens: the schemas and the instructions that come with them.
        overhead_tokens: of the template, around the conversation.
        error_ratio: true count ≤ tokens × (1 + error_ratio).
        text_error_ratio: the same for other prompts of this kind of text, whose beginning the server has not counted.
        text_ratio: by how much sizes and tools_tokens may be larger in such prompts, as a factor of at least 1.
        exact: the vocabulary is the model's own and the template is known for everything in this request.
        rendered: the template was rendered; if not, a formula stands for it.
        raw_tokens: the count before calibration.
        media_tokens: the part of raw_tokens that images, sound and pages take by estimate; media_factor: of that, the
            part in `tokens`; images: of how many.
        media_doubt_tokens: by how much more they may take, of those whose price no server has told.
        allowance_tokens: the part of raw_tokens that may be rendered as far less: images, reasoning of older turns.
        extras_tokens: the part of them that the request's extras take, which a server may not render at all.
        doubtful_tools_tokens: the part of raw_tokens that tools take by estimate; the template may leave them out.
        left_out_tokens: of text that the template leaves out, not in raw_tokens; the server's own template may not.
        mix: of the text: beyond ASCII, stand-ins count up to 4 times too much, of digits up to 3 times.
        calibrated: the server has confirmed like requests.
        counting_method: of raw_tokens; lessons hold only for counts made in the same way.
        profile: of the messages, if a stand-in counted them.
        role: of the last message.
        prefix_tokens: of the system messages that it begins with.
        prints: of the messages with tools and extras, to the letter; empty if it has none.
        anchor: the prompt that it begins with and that the server has counted, if any.
    """

    tokens: int
    sizes: tuple[int, ...]
    tools_tokens: int
    overhead_tokens: int
    error_ratio: float
    text_error_ratio: float
    exact: bool
    raw_tokens: float
    rendered: bool = False
    media_tokens: float = 0.0
    media_factor: float = 1.0
    images: int = 0
    media_doubt_tokens: int = 0
    allowance_tokens: float = 0.0
    extras_tokens: float = 0.0
    doubtful_tools_tokens: float = 0.0
    left_out_tokens: float = 0.0
    text_ratio: float = 1.0
    mix: Mix = PLAIN
    calibrated: bool = False
    counting_method: str = ""
    profile: Profile | None = None
    role: str = ""
    prefix_tokens: int = 0
    prints: Fingerprints = ()
    anchor: Anchor | None = None

    @property
    def is_told(self) -> bool:
        """Returns True if the server has counted exactly this prompt."""
        return self.anchor is not None and self.anchor.raw_tokens == self.raw_tokens

    @property
    def fingerprint(self) -> int:
        """Of all that was counted; 0 if it has none."""
        return self.prints[-1] if self.prints else 0

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


def solid_tokens(count: Count) -> float:
    """The part of a count that no server may leave out; templates without a place for tools leave those."""
    text_tokens = count.raw_tokens - count.media_tokens
    if text_tokens <= 0:
        return 0.0
    left_out_tokens = count.allowance_tokens - count.media_tokens + count.doubtful_tools_tokens
    solid_ratio = max(0.0, 1 - left_out_tokens / text_tokens)
    return (count.tokens - count.media_tokens * count.media_factor) * solid_ratio


def holding(count: Count, known: Sequence[Count]) -> Count:
    """The count of a prompt that holds the texts of others, which the server has counted: only the rest is in doubt.

    Unlike an anchor it need not begin with them. Errs high by the templates' text around each of the others; `count`
    itself if that says more.

    Args:
        count: of the larger prompt.
        known: of the others, as the server counts them; nothing of the prompt is in two of them.
    """
    if count.tokens <= 0 or count.is_told:
        return count
    rest_raw_tokens = count.raw_tokens - sum(
        part.raw_tokens * (1 - part.overhead_tokens / max(1, part.tokens)) for part in known
    )
    known_tokens = sum(part.tokens for part in known)
    rest_tokens = max(0.0, rest_raw_tokens) * max(1.0, count.tokens / count.raw_tokens)
    tokens = known_tokens + ceil(rest_tokens)
    # The doubt of a count with an anchor lies in the part after that, which may be all of the rest.
    most_ratio = count.tokens / count.raw_tokens * (1 + max(count.error_ratio, count.text_error_ratio))
    wrong_tokens = sum(part.tokens * part.error_ratio for part in known)
    wrong_tokens += max(0.0, max(0.0, rest_raw_tokens) * most_ratio - rest_tokens)
    # All that the template leaves out of the rest may be in the server's.
    left_out_tokens = max(0.0, count.left_out_tokens - sum(part.left_out_tokens for part in known))
    factors = [part.tokens / (part.raw_tokens + part.left_out_tokens) for part in known]
    wrong_tokens += left_out_tokens * max((1.0, *factors))
    if tokens + wrong_tokens >= count.tokens * (1 + count.error_ratio):
        return count
    ratio = min(1.0, tokens / count.tokens)
    sizes = tuple(int(size * ratio) for size in count.sizes)
    tools_tokens = int(count.tools_tokens * ratio)
    return replace(
        count,
        tokens=tokens,
        sizes=sizes,
        tools_tokens=tools_tokens,
        overhead_tokens=tokens - tools_tokens - sum(sizes),
        error_ratio=wrong_tokens / tokens,
        calibrated=count.calibrated or all(part.is_told for part in known),
    )


def most_tokens(count: Count) -> int:
    """The most that a prompt takes, with an answer of one token.

    Text like none that the server has counted may take twice our count, whichever family the model is of.
    """
    if count.calibrated:
        return int(count.tokens * (1 + count.error_ratio)) + 1
    known_tokens, known_left_out = 0, 0.0
    if count.anchor is not None:
        known_tokens, known_left_out = count.anchor.prompt_tokens, count.anchor.left_out_tokens
    left_out_tokens = max(0.0, count.left_out_tokens - known_left_out)
    unconfirmed_tokens = max(0, count.tokens - known_tokens) * _UNCONFIRMED_ERROR
    unconfirmed_tokens += left_out_tokens * (1 + _UNCONFIRMED_ERROR)
    return count.tokens + ceil(max(count.tokens * count.error_ratio, unconfirmed_tokens)) + 1


def unconfirmed_tokens(count: Count) -> int:
    """By how many tokens a prompt may be more than its count while no answer has shown how its server counts."""
    return count.media_doubt_tokens + (0 if count.calibrated else most_tokens(count) - count.tokens)


def least_tokens(count: Count) -> float:
    """The least that a prompt takes, however wrong our estimate is; images and doubtful tools may take nothing."""
    doubt_ratio = min(count.error_ratio, 1.0)
    if count.anchor is not None:
        return max(count.anchor.prompt_tokens * (1 - _OLD_TURNS_RATIO), count.tokens * (1 - doubt_ratio))
    solid = max(0.0, solid_tokens(count) - (count.tools_tokens if count.doubtful_tools_tokens else 0))
    if not (count.rendered or count.calibrated or count.exact):
        # Of English and code stand-ins count 0 to 10 % too much, an unknown model's 32 % (`families.py`); of digits and
        # other scripts several times too much.
        doubt_ratio = max(_LEAST_DOUBT, doubt_ratio - _SAFE_ERROR)
        doubt_ratio += _OTHER_DOUBT * count.mix.other_share + _DIGIT_DOUBT * count.mix.digit_share
    return solid * max(0.0, 1 - doubt_ratio)


def least_ratio(mix: Mix, error_ratio: float, *, is_sure: bool) -> float:
    """The least part of a count that a server's number reaches if it has counted the same."""
    if is_sure:
        return 1 - max(0.15, 3 * error_ratio)
    # Beyond ASCII a stand-in counts up to 4 times too much, without anything being cut.
    return 0.55 - _OTHER_DOUBT * mix.other_share - _DIGIT_DOUBT * mix.digit_share


def least_ratio_of(count: Count) -> float:
    return least_ratio(count.mix, count.error_ratio, is_sure=count.calibrated or count.exact)
