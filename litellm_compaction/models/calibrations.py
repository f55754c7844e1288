"""What one deployment's server has taught: its calibrations by how prompts were counted, and their form when kept.

Called by `counter.py` and `anchored.py`.
"""

from __future__ import annotations

import json

from litellm_compaction.models.calibration import Calibration

_NEW = "|new"
_MAX_BASES = 8
_VERSION = 1


class Calibrations:
    """A deployment's calibrations by basis, which is how prompts were counted: of other ways they say nothing.

    Attributes:
        has_warned: whether it has been told that the deployment's exact family is off.
    """

    def __init__(self) -> None:
        self.has_warned = False
        self._by_basis: dict[str, Calibration] = {}

    def of(self, basis: str) -> Calibration:
        """What whole prompts take."""
        found = self._by_basis.get(basis)
        if found is None:
            # A thread that counts a text may ask for the same one in between.
            found = self._by_basis.setdefault(basis, Calibration())
        return found

    def of_new(self, basis: str) -> Calibration:
        """What new messages take by themselves, without what a server adds to every prompt."""
        return self.of(basis + _NEW)

    def gist(self) -> tuple[object, ...]:
        """Changes only when what was learned has changed noticeably."""
        return tuple((basis, found.gist()) for basis, found in self._learned())

    def as_json(self) -> str:
        """What was learned, for another process; no text of anybody."""
        return json.dumps({"version": _VERSION, "calibrations": {k: found.as_json() for k, found in self._learned()}})

    def take_over(self, text: str) -> None:
        """Adds what another process has learned; whatever `as_json` cannot have written is ignored."""
        try:
            facts = json.loads(text)
        except (RecursionError, ValueError):
            return
        if not isinstance(facts, dict) or facts.get("version") != _VERSION:
            return
        by_basis = facts.get("calibrations")
        for basis, rows in list(by_basis.items())[:_MAX_BASES] if isinstance(by_basis, dict) else ():
            self.of(basis).take_over(rows)

    def _learned(self) -> list[tuple[str, Calibration]]:
        # A copy at once: a thread that counts a text may add a basis meanwhile.
        known = list(self._by_basis.items())
        return [(basis, found) for basis, found in known if not found.is_empty][-_MAX_BASES:]
