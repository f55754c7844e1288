"""What a request's tokens are before any calibration, and what is known of how they were counted.

Made by `counting.py` and `formula.py`, read by `counter.py` and `anchored.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from litellm_compaction.models.calibration import Mix
from litellm_compaction.models.growth import Profile

# Less of the estimate is the server's own way to begin a prompt.
_LEFT_OUT_RATIO = 0.02
_PRICED_ERROR, _OTHER_ERROR = 0.02, 0.05


class RawCount(NamedTuple):
    """Tokens before calibration; `sizes`, `tools_tokens`, `overhead_tokens` as in `Count`.

    Attributes:
        allowance_tokens: the part of them that may be rendered as far less: images, reasoning of older turns.
        error_ratio: true count ≤ tokens × (1 + error_ratio).
        rendered: they were counted in the rendered prompt.
        exact: nothing in them is an estimate.
        mix: of the text, as far as a stand-in vocabulary counted it.
        profile: of the messages, likewise.
        doubtful_tools_tokens: the part of `tools_tokens` that a template may not render at all.
        media: of images, sound and pages, by estimate; media[i] is a part of sizes[i]; empty where there are none.
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

    @property
    def tokens(self) -> float:
        """All of them."""
        return self.overhead_tokens + self.tools_tokens + sum(self.sizes)

    @property
    def media_tokens(self) -> float:
        """Those of images, sound and pages."""
        return sum(self.media)

    @property
    def text_tokens(self) -> float:
        """All others."""
        return self.tokens - self.media_tokens

    def with_extras(self, tokens: float) -> RawCount:
        """The same with text around the messages that a server may render, or may not."""
        return self._replace(
            overhead_tokens=self.overhead_tokens + tokens,
            allowance_tokens=self.allowance_tokens + tokens,
            error_ratio=max(self.error_ratio, _OTHER_ERROR),
            exact=False,
        )

    def with_tools_priced(self, ratio: float, *, exact: bool) -> RawCount:
        """The same where a server has shown what it makes of tools: so much of their estimate.

        Args:
            ratio: true tokens per estimated one.
            exact: the rest is.
        """
        is_left_out = ratio <= _LEFT_OUT_RATIO
        return self._replace(
            tools_tokens=0.0 if is_left_out else self.tools_tokens * ratio,
            doubtful_tools_tokens=0.0,
            exact=exact and is_left_out,
            error_ratio=min(self.error_ratio, _PRICED_ERROR) if is_left_out else max(self.error_ratio, _OTHER_ERROR),
        )

    def sizes_by(self, factor: float, media_factor: float) -> list[float]:
        """Sizes with text and media each by its own factor."""
        if not self.media:
            return [size * factor for size in self.sizes]
        return [
            (size - media) * factor + media * media_factor for size, media in zip(self.sizes, self.media, strict=True)
        ]
