"""What images, sound and pages really cost at a deployment, against the estimate of `images.py`, by its usage.

Kept with a deployment's calibration. Prices differ by server and settings (an image scaled down before it is seen, a
model that sees none), never much between two images of one client; the highest of late counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

# Of the estimate: what a server adds to each image, or an estimate by area that is far too low, explains no more.
_MAX_RATIO = 4.0
# What is observed may be wrong by this part of the estimate: the text beside it is an estimate too.
_MAX_DOUBT_RATIO = 0.2
# Below this a template's marks around an image decide.
_LEAST_TOKENS = 16
_KEPT = 8
_FIRST_ERROR, _SETTLED_ERROR, _SETTLED_SAMPLES = 0.15, 0.05, 3
_OPTIMISM_ERROR = 0.5
_MAX_NUMBER = 1e9


class Price(NamedTuple):
    """What media cost.

    Attributes:
        factor: true tokens per estimated one.
        doubt_ratio: true tokens ≤ estimate × (factor + this); None where nothing is known.
    """

    factor: float = 1.0
    doubt_ratio: float | None = None


UNKNOWN = Price()


class _Sample(NamedTuple):
    ratio: float
    estimated_tokens: float


@dataclass(slots=True)
class MediaPrices:
    """The last ratios of one deployment, true tokens per estimated one; replaced, never changed."""

    _samples: tuple[_Sample, ...] = ()

    def price(self) -> Price:
        """What the next image is expected to cost, relative to its estimate."""
        if not self._samples:
            return UNKNOWN
        ratios = [sample.ratio for sample in self._samples]
        factor = max(ratios)
        doubt = _SETTLED_ERROR * factor
        if len(ratios) < _SETTLED_SAMPLES:
            # The next one may be of another kind, at its full estimate.
            doubt = max(_FIRST_ERROR * factor, _OPTIMISM_ERROR * (1 - factor))
        return Price(factor, max(doubt, factor - min(ratios)))

    def note(self, estimated_tokens: float, observed_tokens: float, doubt_tokens: float) -> None:
        """Takes over what a server has counted for media, unless other things may explain it.

        Args:
            estimated_tokens: ours.
            observed_tokens: the server's number for the prompt, without what its text takes.
            doubt_tokens: by how much that text may take more or less.
        """
        if estimated_tokens < _LEAST_TOKENS or doubt_tokens > _MAX_DOUBT_RATIO * estimated_tokens:
            return
        ratio = observed_tokens / estimated_tokens
        # Text that is a little shorter than we count looks like a price below nothing.
        if -_MAX_DOUBT_RATIO <= ratio <= _MAX_RATIO:
            self._samples = (*self._samples, _Sample(max(0.0, ratio), estimated_tokens))[-_KEPT:]

    def as_json(self) -> list[list[float]]:
        """All that it has learned."""
        return [[round(sample.ratio, 4), round(sample.estimated_tokens)] for sample in self._samples]

    def take_over(self, rows: object) -> None:
        """Puts what `as_json` once gave behind what was learned since; skips rows that it cannot have written."""
        found = [row for row in rows if _is_row(row)] if isinstance(rows, list) else []
        self._samples = (*(_Sample(*row) for row in found), *self._samples)[-_KEPT:]

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been learned yet."""
        return not self._samples

    def gist(self) -> tuple[int, ...]:
        """Changes only where the next price changes noticeably: by 5 % of the estimate."""
        return min(len(self._samples), _SETTLED_SAMPLES), round(20 * self.price().factor)


def _is_row(row: object) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 2
        and all(isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) for value in row)
        and 0 <= row[0] <= _MAX_RATIO
        and 0 < row[1] < _MAX_NUMBER
    )
