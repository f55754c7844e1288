"""What can be decided about a request, as values. Made by the planner, carried out by the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from litellm_compaction.core.compaction import Compaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Send the messages as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Apply a compaction that was made for the beginning of this very conversation."""

    compaction: Compaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Summarize:
    """Make a new compaction.

    Attributes:
        covered_messages: how many messages after the lead it will replace.
        pinned: positions of those among them that stay verbatim.
        base: the compaction whose summaries it continues, or None.
        integrates: whether the base's segments are rewritten into one, because they outgrew their share.
        provisional: whether there is no room for a new summary; the base's is carried on, shortened.
        fallback: for a hand-off, which covers all but the sacred tail, what to make without a summary; else None.
        summary_tokens: bound on the new segment, or on the carried one.
        ledger_tokens: bound on the ledger; words_tokens of it may be the user's own words.
        predicted_tokens: the prompt afterwards, at most.
        carried_round: of a record that the covered messages themselves carry, 0 for none.
    """

    covered_messages: int
    pinned: tuple[int, ...] = ()
    base: Compaction | None
    integrates: bool
    provisional: bool
    summary_tokens: int
    ledger_tokens: int
    words_tokens: int
    predicted_tokens: int
    fallback: Summarize | None = None
    carried_round: int = 0

    @property
    def round(self) -> int:
        """Of the compaction that will be made."""
        return max(self.base.round if self.base else 0, self.carried_round) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Make a compaction without a model: old results become stubs, and that alone reaches the target (rung 1).

    Attributes:
        compaction: what is to be made, still without its ledger.
        ledger_tokens: bound on the ledger of what is not shown any more; words_tokens of it may be the user's words.
        predicted_tokens: the prompt afterwards, at most.
        otherwise: what to make instead where the edit, counted as it is sent, does not do.
    """

    compaction: Compaction
    ledger_tokens: int
    words_tokens: int
    predicted_tokens: int
    otherwise: Prune | Summarize

    @property
    def round(self) -> int:
        """Of the compaction that will be made."""
        return self.compaction.round


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Ask a model which of the covered messages may go or become shorter.

    Attributes:
        compaction: what is to be made, still without what the model says and without its ledger.
        base: the compaction that it continues, or None.
        now_tokens: the prompt without it.
        summary_tokens: bound on what is said of the messages that go.
        carried_tokens: of records of other tools among them, which is said besides.
        ledger_tokens: bound on their ledger; words_tokens of it may be the user's words.
        predicted_tokens: the prompt that is aimed at.
        otherwise: what to make instead where the model's answer does not do.
    """

    compaction: Compaction
    base: Compaction | None
    now_tokens: int
    summary_tokens: int
    carried_tokens: int
    ledger_tokens: int
    words_tokens: int
    predicted_tokens: int
    otherwise: Summarize

    @property
    def round(self) -> int:
        """Of the compaction that will be made."""
        return self.compaction.round


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The sacred messages alone are too large."""


Making: TypeAlias = Edit | Prune | Summarize
Plan: TypeAlias = Keep | Reuse | Making | Refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """The operator's wishes about a compaction's depth.

    Attributes:
        keep_recent_messages: at the end, where they fit.
        summary_max_tokens: bound on a summary.
        edits: whether rung 1 may do alone.
        hands_off: whether a summary takes the place of all but the sacred tail.
        prunes: whether a model is asked first which messages may go.
    """

    keep_recent_messages: int
    summary_max_tokens: int
    edits: bool = True
    hands_off: bool = False
    prunes: bool = False
