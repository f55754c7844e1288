"""What was done with each message of a conversation, as lines for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from litellm_compaction.core.clearing import superseded_reads
from litellm_compaction.core.compaction import Compaction, Rung, edited_part
from litellm_compaction.core.messages import JsonObject, JsonValue, Message, lead_length
from litellm_compaction.events import CompactionEvent

Fate: TypeAlias = Literal["kept", "edited", "summarized", "dropped", "offered"]
Decided: TypeAlias = Literal["below_trigger", "gains_nothing"] | Rung

_DONE: dict[Decided, str] = {
    "below_trigger": "Nothing to do: with room for the answer it stays below 80 % of the window.",
    "gains_nothing": "Nothing to do: no cut would gain enough, and it fits.",
    "edit": "Old tool results give way to one line each; no summary is needed.",
    "summary": "The older part gives way to a summary, with what it has to keep verbatim beside it.",
    "handoff": "Everything but the newest request gives way to a hand-off, with what has to stay verbatim beside it.",
    "prune": "The model says which of the older messages go or become shorter.",
    "truncate": "The older part is dropped but for what the record quotes verbatim.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of the command.

    Attributes:
        originals: n, as they were read; sizes[i] are the tokens of originals[i].
        fixed_tokens: of tools, and of what the template adds.
        compaction: that is applied, None for none; in a dry run without its texts.
        decided: which rung of the ladder, or why none.
        tokens_after: of the new prompt; in a dry run its bound.
        messages: the new list, None where it is the old one.
        event: what the engine told, None in a dry run.
    """

    model: str
    window_tokens: int
    originals: Sequence[Message]
    sizes: Sequence[int]
    fixed_tokens: int
    compaction: Compaction | None
    decided: Decided
    tokens_after: int
    dry_run: bool
    messages: Sequence[Message] | None = None
    event: CompactionEvent | None = None

    @property
    def tokens_before(self) -> int:
        """Of the prompt as it was read."""
        return self.fixed_tokens + sum(self.sizes)


class _Run(NamedTuple):
    """Neighbours that share a line; first and last count from 1."""

    first: int
    last: int
    tokens: int
    what: str


def fates(messages: Sequence[Message], compaction: Compaction | None, *, dry_run: bool = False) -> list[Fate]:
    """What happens to each message.

    `edited` is sent in its place, but shorter. `summarized` is what the summary stands for. `dropped` leaves no more
    than quotations: old reads that a later one repeats, and everything covered where there is no summary. `offered` is,
    in a dry run, what a pruning model would choose from.
    """
    if compaction is None:
        return ["kept"] * len(messages)
    lead, covered = lead_length(messages), compaction.covered_messages
    rest = messages[lead:]
    replaced = compaction.replaced_messages
    shown = edited_part(rest, compaction)
    repeated = superseded_reads(rest[:covered])

    def fate(position: int) -> Fate:
        if position >= covered or position in compaction.pinned:
            return "kept"
        if position >= replaced and dry_run and compaction.rung == "prune" and not rest[position].is_system:
            return "offered"
        if position >= replaced:
            sent = shown[position - replaced]
            return "dropped" if sent is None else "kept" if sent is rest[position] else "edited"
        return "dropped" if compaction.rung == "truncate" or position in repeated else "summarized"

    system: list[Fate] = ["kept"] * lead
    return [*system, *map(fate, range(len(rest)))]


def as_lines(report: Report) -> Iterator[str]:
    """The report for people; numbers and roles, no text of the conversation."""
    yield (
        f"{len(report.originals)} messages, {report.tokens_before:,} tokens, "
        f"for {report.model} with {report.window_tokens:,}."
    )
    yield _DONE[report.decided]
    yield ""
    yield f"{'messages':>11}  {'tokens':>9}"
    if report.fixed_tokens:
        yield f"{'template':>11}  {report.fixed_tokens:>9,}  kept, tools included"
    for run in _runs(report):
        numbers = f"{run.first}" if run.first == run.last else f"{run.first}–{run.last}"
        yield f"{numbers:>11}  {run.tokens:>9,}  {run.what}"
    yield ""
    bound = "at most " if report.dry_run and report.compaction else ""
    share = 100 * report.tokens_after / report.window_tokens
    yield f"{report.tokens_before:,} → {bound}{report.tokens_after:,} tokens, {share:.0f} % of the window."
    if report.dry_run:
        yield "Dry run: no model was asked."
    event = report.event
    if event is not None and event.summary_calls:
        calls = "call" if event.summary_calls == 1 else "calls"
        yield f"{event.summary_calls} summary {calls} of {event.pruning_model} in {event.summary_ms:,.0f} ms."
    if event is not None and event.rung == "truncate":
        yield f"There is no summary: {event.reason or 'no room'}."
    elif event is not None and event.reason:
        yield f"It was not made as configured: {event.reason}."


def as_json(report: Report, request: JsonObject | None) -> dict[str, JsonValue]:
    """The report for programs; `request` is the new request, None in a dry run."""
    event = report.event
    return {
        "model": report.model,
        "window_tokens": report.window_tokens,
        "decided": report.decided,
        "dry_run": report.dry_run,
        "tokens_before": report.tokens_before,
        "tokens_after": report.tokens_after,
        "fixed_tokens": report.fixed_tokens,
        "messages": [
            {"role": message.role, "tokens": size, "fate": fate}
            for message, size, fate in zip(report.originals, report.sizes, _fates(report), strict=True)
        ],
        "summary_calls": event.summary_calls if event else 0,
        "summary_ms": round(event.summary_ms) if event else 0,
        "reason": event.reason if event else "",
        "request": request,
    }


def _fates(report: Report) -> list[Fate]:
    return fates(report.originals, report.compaction, dry_run=report.dry_run)


def _runs(report: Report) -> Iterator[_Run]:
    """The fates as few lines; calls between edited results share theirs."""
    found = _fates(report)
    edited = [at for at, fate in enumerate(found) if fate == "edited"]
    between = range(edited[0], edited[-1]) if edited else range(0)
    shown: list[Fate] = ["edited" if at in between else fate for at, fate in enumerate(found)]
    for fate, neighbours in groupby(range(len(found)), key=shown.__getitem__):
        span = list(neighbours)
        kept = sum(found[at] == "kept" for at in span)
        aside = f", {kept} of them kept" if fate == "edited" and kept else ""
        yield _Run(span[0] + 1, span[-1] + 1, sum(report.sizes[at] for at in span), f"{fate}{aside}")
