"""The page's two tables: guarded deployments, and what happened."""

from __future__ import annotations

import time
from collections.abc import Sequence

from litellm_compaction.events import CompactionEvent, Kept, TruncationAlarm
from litellm_compaction.proxy.pages.content import Row
from litellm_compaction.proxy.pages.markup import Child, Html, name_of, tag

_WORDS = {
    "compacted": "compacted",
    "reused": "reused",
    "fallback": "cut without a model",
    "refused": "refused",
    "observed": "would be compacted",
    "failed_open": "failed, sent unchanged",
    "kept": "kept",
}
_NUMBERS = ("Window", "Parallel", "Before → after", "Fill", "Round")
_PHASES = {"pre_request": "before the request", "tool_response": "tool results", "streaming": "in mid-answer"}


def deployments_table(rows: Sequence[Row]) -> Html:
    """One row a deployment."""
    if not rows:
        return tag("p", "None that you may see.", class_="quiet")
    names = (
        "Model",
        "Window",
        "Source",
        "Parallel",
        "Counts by",
        "Last count",
        "Carried over the limit",
        "Own settings",
    )
    return _table("Guarded deployments", names, [_deployment(row) for row in rows])


def events_table(events: Sequence[Kept], *, sees_all: bool) -> Html:
    """One row an event, the newest first."""
    if not events:
        return tag("p", "None yet." if sees_all else "None yet of your team, user or key.", class_="quiet")
    names = ("Time", "Model", "What", "When in the request", "Before → after", "Window", "Fill", "Round", "Summary")
    rows = [_event(event, times) for event, times in _folded(events)]
    return _table("Compactions and refusals", names, rows)


def clock_text(when_s: float) -> str:
    """A wall clock time for people, in UTC; "" for one that no calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when_s))
    except (ValueError, OverflowError, OSError):
        return ""


def _folded(events: Sequence[Kept]) -> list[tuple[Kept, int]]:
    """The events with their number, a compaction's reuses in a row as the newest of them."""
    rows: list[tuple[Kept, int]] = []
    for event in events:
        last, times = rows[-1] if rows else (None, 0)
        if _is_reuse(event) and last is not None and _is_reuse(last) and _record(event) == _record(last):
            rows[-1] = (last, times + 1)
        else:
            rows.append((event, 1))
    return rows


def _is_reuse(event: Kept) -> bool:
    return isinstance(event, CompactionEvent) and event.outcome == "reused"


def _record(event: Kept) -> tuple[str, str]:
    return event.model, event.compaction_id if isinstance(event, CompactionEvent) else ""


def _table(label: str, names: Sequence[str], rows: Sequence[Html]) -> Html:
    columns = [tag("th", name, scope="col", class_="number" if name in _NUMBERS else None) for name in names]
    head = tag("thead", tag("tr", columns))
    table = tag("table", tag("caption", label, hidden=True), head, tag("tbody", rows))
    return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex="0")


def _deployment(row: Row) -> Html:
    known = row.window_tokens is not None
    return tag(
        "tr",
        tag("th", name_of(row.group), tag("br"), tag("span", name_of(row.model), class_="quiet"), scope="row"),
        tag("td", f"{row.window_tokens:,}" if known else row.state, class_="number" if known else None),
        tag("td", row.source or "–"),
        tag("td", "–" if row.parallel is None else str(row.parallel), class_="number"),
        tag("td", _counting(row) if row.tokenizer else "–"),
        tag("td", _accuracy(row)),
        tag("td", row.carrier or "–", [tag("br"), tag("span", row.goes_on, class_="quiet")] if row.goes_on else None),
        tag("td", f"mode: {row.mode}", [[tag("br"), text] for text in row.own], _conflict(row)),
    )


def _counting(row: Row) -> str:
    whose = "own vocabulary" if row.owns_vocabulary else "stand-in"
    memory = f", {row.memory_bytes / 2**20:.0f} MB" if row.memory_bytes is not None else ""
    return f"{row.family} · {row.tokenizer} ({whose}{memory})"


def _accuracy(row: Row) -> Child:
    known = row.accuracy
    if known is None:
        return "no answer yet"
    off = known.deviation_percent
    text = f"{off:+.1f} % ({known.counted_tokens:,} counted, {known.reported_tokens:,} reported)"
    return tag("span", text, class_="bad" if abs(off) > 20 else None)


def _conflict(row: Row) -> Child:
    return (
        [tag("br"), tag("span", f"Changes made here do not reach it: {row.conflict}", class_="bad")]
        if row.conflict
        else None
    )


def _event(event: Kept, times: int) -> Html:
    when = tag("td", clock_text(event.when_s), class_="time")
    model = tag("td", name_of(event.model), class_="name")
    if isinstance(event, TruncationAlarm):
        return tag(
            "tr",
            when,
            model,
            tag("td", tag("span", "truncation alarm", class_="bad"), ": ", _spaced(event.reason)),
            tag("td", "after the answer"),
            tag("td", f"{event.expected_tokens:,} expected, {event.reported_tokens:,} seen", class_="number"),
            tag("td", f"{event.window_tokens:,}", class_="number"),
            tag("td", _percent(event.reported_tokens, event.window_tokens), class_="number"),
            tag("td", "–"),
            tag("td", "–"),
        )
    outcome = _WORDS.get(event.outcome, event.outcome) + (f" ×{times}" if times > 1 else "")
    is_bad = event.outcome in ("fallback", "refused", "failed_open")
    return tag(
        "tr",
        when,
        model,
        tag(
            "td",
            tag("span", outcome, class_="bad" if is_bad else None),
            f": {_spaced(event.reason)}" if event.reason else "",
        ),
        tag("td", _PHASES.get(event.phase, event.phase)),
        tag("td", f"{event.tokens_before:,} → {event.tokens_after:,}", class_="number"),
        tag("td", f"{event.window_tokens:,}", class_="number"),
        tag("td", _percent(event.tokens_before, event.window_tokens), class_="number"),
        tag("td", str(event.round) if event.round else "–", class_="number"),
        tag("td", _cost(event), class_="name"),
    )


def _percent(tokens: int, window_tokens: int) -> str:
    return f"{100 * tokens / window_tokens:.0f} %" if window_tokens > 0 else "–"


def _cost(event: CompactionEvent) -> Child:
    if not event.summary_calls:
        return "–"
    calls = "call" if event.summary_calls == 1 else "calls"
    return [f"{event.summary_calls} {calls} of ", name_of(event.pruning_model), f", {event.summary_ms / 1000:.1f} s"]


def _spaced(word: str) -> str:
    return word.replace("_", " ")
