"""What was learned of a deployment, read by threads that count texts while the event loop teaches it more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from litellm_compaction.tokens import calibration as calibrations
from litellm_compaction.tokens.calibration import PLAIN, Calibration, Calibrations, Mix


class _Interrupted(Mix):
    """A mix during whose comparison the server's next number comes, as it can between two steps of a thread."""

    calibration = Calibration()

    def __iter__(self) -> Iterator[float]:
        self.calibration.add(2000, 0, PLAIN, 2200)
        return super().__iter__()


class _Asked(Calibration):
    """A calibration that is asked while a thread counts the first text of another basis."""

    known = Calibrations()

    @property
    def is_empty(self) -> bool:
        self.known.of("another")
        return False


def test_a_number_that_comes_during_a_prediction_changes_the_next_one() -> None:
    """The prediction goes by what was known when it began."""
    calibration = _Interrupted.calibration
    calibration.add(1000, 0, PLAIN, 1000)
    request = _Interrupted(0.0, 0.0)
    assert calibration.predict(1000, request, 0.1).factor == 1.0
    assert calibration.predict(1000, PLAIN, 0.1).factor == 1.1


def test_a_basis_that_is_new_does_not_disturb_who_reads_the_others() -> None:
    """Its calibration is empty anyway."""
    _Asked.known._by_basis["one"] = _Asked()
    assert len(_Asked.known.gist()) == 1
    assert len(_Asked.known._by_basis) == 2


def test_two_that_ask_at_the_same_time_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the event loop teaches the one must not be lost because a thread has made another."""
    known, made = Calibrations(), list[Calibration]()

    def make() -> Calibration:
        if not made:
            made.append(Calibration())
            made.append(known.of("one"))
        return Calibration()

    monkeypatch.setattr(calibrations, "Calibration", make)
    found = known.of("one")
    assert found is made[1]
    assert known.of("one") is found
