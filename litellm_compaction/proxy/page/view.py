"""The page as HTML: its two tables, the form of settings, a conversation's plot, and its one style sheet.

Data in, HTML out. Everything that goes in is escaped, unless it is HTML that was made here. The header that comes with
the style sheet allows it and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import time
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from litellm_compaction.events import CompactionEvent, Kept, TruncationAlarm
from litellm_compaction.proxy.page.content import Content, Field, Notice, Row
from litellm_compaction.proxy.page.history import Talk, Turn

# Not allowed in HTML at all (WHATWG HTML, 13.2.3.5 "control-character-in-input-stream"); lone surrogates have no bytes.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"br", "col", "hr", "input", "link", "meta"})


class Html(str):
    """Text that is HTML already. Made by `tag` and `raw` only."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"
Attribute: TypeAlias = "str | int | float | bool | None"


def escaped(text: str) -> Html:
    """`text` as it can stand in an element or a quoted attribute."""
    return Html(html.escape(_UNPRINTABLE.sub("\ufffd", text), quote=True))


def raw(text: str) -> Html:
    """Text that is written in this package, not by anybody else: style sheets, entities."""
    return Html(text)


def joined(children: Child) -> Html:
    """Children side by side; None is nothing."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, str | int):
        return escaped(str(children))
    return Html("".join(joined(child) for child in children))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """An element.

    Args:
        name: of the element.
        children: text is escaped.
        attributes: a trailing `_` is dropped and the others become `-`; True has no value, False and None leave it out.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        own_name = key.rstrip("_").replace("_", "-")
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        parts.append(own_name if value is True else f'{own_name}="{escaped(shown)}"')
    opening = f"<{' '.join(parts)}>"
    return Html(opening if name in _VOID else f"{opening}{joined(children)}</{name}>")


def name_of(text: str) -> Html:
    """A name that a client may have chosen, kept from turning the text around it."""
    return tag("bdi", text)


STYLE = """
:root { color-scheme: light dark; --paper: #fff; --soft: #f3f5f8; --ink: #16202c; --quiet: #52606f; --line: #c9d1da;
  --accent: #0b5cad; --on-accent: #fff; --bad: #b3261e; --good: #1b6e3c; --prompt: #1d5a9e; --answer: #6496cd;
  --compact: #8a5a00; --restart: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #12171d; --soft: #1b222b; --ink: #e6ebf1; --quiet: #a3b0be;
  --line: #3a4653; --accent: #7db7f5; --on-accent: #0d1720; --bad: #ff9a90; --good: #7fd6a0; --prompt: #5b9be0;
  --answer: #3d6fa3; --compact: #f0b95a; --restart: #ff9a90; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
header, main, footer { max-width: 76rem; margin: 0 auto; padding: 0 1rem; }
header { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center; justify-content: space-between;
  padding-top: 1rem; }
h1 { font-size: 1.4rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
p { margin: .25rem 0 .75rem; }
.quiet { color: var(--quiet); font-size: .9rem; }
.who { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: center; }
.notice { border-left: .3rem solid var(--accent); background: var(--soft); padding: .6rem .9rem; margin: .75rem 0;
  overflow-wrap: anywhere; }
.notice.problem { border-color: var(--bad); }
.notice.done { border-color: var(--good); }
.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: .75rem; }
.field { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem .9rem; margin: 0;
  min-width: 0; }
.field.changed { border-color: var(--accent); }
label { display: block; font-weight: 600; }
.field p { margin: .25rem 0 0; font-size: .875rem; color: var(--quiet); overflow-wrap: anywhere; }
.field p.bad { color: var(--bad); font-weight: 600; }
.field p.note { color: var(--ink); }
select, input { font: inherit; width: 100%; max-width: 100%; margin-top: .3rem; padding: .4rem .5rem; color: var(--ink);
  background: var(--paper); border: 1px solid var(--quiet); border-radius: .35rem; }
[aria-invalid] { border: 2px solid var(--bad); }
button { font: inherit; padding: .4rem .9rem; border-radius: .35rem; border: 1px solid var(--accent); cursor: pointer;
  background: var(--paper); color: var(--accent); }
button.main { background: var(--accent); color: var(--on-accent); }
button.small { padding: .1rem .6rem; font-size: .875rem; margin-top: .4rem; }
.who button.small { margin: 0; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
.actions { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; min-width: 52rem; font-size: .9rem; }
th, td { text-align: left; padding: .4rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--soft); white-space: nowrap; }
tbody th { background: none; font-weight: 600; white-space: normal; }
tbody th, td.name { min-width: 9rem; max-width: 22rem; }
tbody th { min-width: 13rem; }
tr:last-child > * { border-bottom: 0; }
td { min-width: 4rem; }
th.number { text-align: right; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.time { white-space: nowrap; }
bdi { overflow-wrap: anywhere; }
.bad { color: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
.plot { border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; margin: 0; min-width: 0; }
.plot svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--quiet); font: 11px system-ui, sans-serif; }
@media (max-width: 30rem) { svg text { font-size: 13px; } }
.bar { fill: var(--prompt); } .more { fill: var(--answer); }
.rule { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 5 4; }
.full { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: none; }
.base { stroke: var(--line); }
.client { fill: none; stroke: var(--quiet); stroke-width: 1.5; stroke-dasharray: 1 3; stroke-linecap: round; }
.compact { fill: var(--compact); stroke: var(--compact); } .restart { fill: var(--restart); stroke: var(--restart); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; padding: 0; margin: .5rem 0 0;
  font-size: .875rem; }
.legend svg { width: 1.1rem; height: .9rem; margin-right: .35rem; vertical-align: -1px; }
footer { padding: 2rem 1rem; }
.narrow { max-width: 26rem; margin: 15vh auto 0; padding: 0 1rem; }
"""

_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
SECURITY_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    # `no-referrer` would make browsers send `Origin: null` with forms, and auth.py compares it.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


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


# In units of the view box; drawn at about this size in CSS pixels, so that its letters stay readable on a phone.
_WIDTH, _HEIGHT = 400, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 10, 22
_MOST_RATIO = 1.15
_MAX_BARS = 60
_MAX_BAR_WIDTH = 14.0
_LABEL_HEIGHT = 12.0


def plot(talk: Talk) -> Html:
    """The picture with its caption."""
    turns = list(talk.turns)[-_MAX_BARS:]
    first = talk.count - len(turns) + 1
    title, summary = f"plot-{talk.id}-title", f"plot-{talk.id}-text"
    step = min((_WIDTH - _LEFT - _RIGHT) / max(len(turns), 1), 2 * _MAX_BAR_WIDTH)
    shapes = [
        tag("title", f"Context fill of conversation {talk.id}", id=title),
        tag("desc", _summary(talk, turns), id=summary),
        *_rules(talk),
        *(shape for index, turn in enumerate(turns) for shape in _bar(turn, index, step)),
        _client_line(turns, step),
        *(shape for index, turn in enumerate(turns) for shape in _marks(turn, index, step)),
        tag("text", str(first), x=_x(0, step), y=_HEIGHT - 6, text_anchor="middle"),
    ]
    if len(turns) > 1:
        last = f"turn {talk.count}" if len(turns) > 4 else str(talk.count)
        edge = min(_x(len(turns) - 1, step) + _MAX_BAR_WIDTH, _WIDTH - 2)
        shapes.append(tag("text", last, x=edge, y=_HEIGHT - 6, text_anchor="end"))
    picture = tag("svg", shapes, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_labelledby=f"{title} {summary}")
    window_tokens = turns[-1].window_tokens if turns else 0
    when = clock_text(turns[-1].when_s)[:16] if turns else ""
    caption = tag(
        "figcaption",
        tag("h3", name_of(talk.model)),
        tag("p", f"{talk.id} · {_turns(talk.count)} · window {window_tokens:,} · {when}", class_="quiet"),
    )
    return tag("figure", caption, picture, class_="plot")


def _summary(talk: Talk, turns: Sequence[Turn]) -> str:
    if not turns:
        return "No turns."
    compacted = sum(turn.action == "compacted" for turn in turns)
    restarts = sum(len(turn.restarts) for turn in turns)
    fills = [100 * _ratio(turn.filled_tokens, turn) for turn in turns]
    return (
        f"{_turns(len(turns))} of {talk.model}: {min(fills):.0f} to {max(fills):.0f} percent of the window, "
        f"{fills[-1]:.0f} percent after the last one; {compacted} compactions, {restarts} restarts."
    )


def _turns(count: int) -> str:
    return f"{count} turn" if count == 1 else f"{count} turns"


def _rules(talk: Talk) -> list[Html]:
    right = _WIDTH - _RIGHT
    shapes = [tag("line", x1=_LEFT, y1=_y(0), x2=right, y2=_y(0), class_="base")]
    label_y = 0.0
    for ratio in sorted({talk.compact_ratio, talk.carry_ratio, 1.0}, reverse=True):
        kind = "rule full" if ratio == 1.0 else "rule"
        # Lines may lie closer together than their labels can.
        label_y = max(_y(ratio) + 4, label_y + _LABEL_HEIGHT)
        shapes.append(tag("line", x1=_LEFT, y1=_y(ratio), x2=right, y2=_y(ratio), class_=kind))
        shapes.append(tag("text", f"{100 * ratio:.0f} %", x=_LEFT - 4, y=label_y, text_anchor="end"))
    return shapes


def _bar(turn: Turn, index: int, step: float) -> list[Html]:
    width = max(min(step * 0.7, _MAX_BAR_WIDTH), 1.0)
    left = _x(index, step) - width / 2
    prompt, filled = _y(_ratio(turn.prompt_tokens, turn)), _y(_ratio(turn.filled_tokens, turn))
    shapes = [tag("rect", x=left, y=prompt, width=width, height=_y(0) - prompt, class_="bar")]
    if filled < prompt:
        shapes.append(tag("rect", x=left, y=filled, width=width, height=prompt - filled, class_="more"))
    return shapes


def _client_line(turns: Sequence[Turn], step: float) -> Html | None:
    """The conversation as the client sends it, once something was taken out of it."""
    if all(turn.action == "none" for turn in turns):
        return None
    points = " ".join(
        f"{_x(index, step):.1f},{_y(_ratio(turn.before_tokens, turn)):.1f}" for index, turn in enumerate(turns)
    )
    return tag("polyline", points=points, class_="client")


def _marks(turn: Turn, index: int, step: float) -> list[Html]:
    x = _x(index, step)
    shapes: list[Html] = []
    if turn.action == "compacted":
        top, end = _y(_ratio(turn.before_tokens, turn)), _y(_ratio(turn.prompt_tokens, turn))
        shapes.append(tag("line", x1=x, y1=top, x2=x, y2=end, class_="compact"))
        shapes.append(tag("path", d=f"M{x - 4.5:.1f} {top - 4:.1f}h9l-4.5 8z", class_="compact"))
    for drop in turn.restarts:
        y = _y(_ratio(drop.before_tokens, turn))
        shapes.append(tag("line", x1=x, y1=y, x2=x, y2=_y(_ratio(drop.after_tokens, turn)), class_="restart"))
        shapes.append(tag("circle", cx=x, cy=y, r=4, class_="restart"))
    return shapes


def _ratio(tokens: int, turn: Turn) -> float:
    return tokens / max(turn.window_tokens, 1)


def _x(index: int, step: float) -> float:
    return _LEFT + step * (index + 0.5)


def _y(ratio: float) -> float:
    inside = min(max(ratio, 0.0), _MOST_RATIO) / _MOST_RATIO
    return round(_HEIGHT - _BOTTOM - inside * (_HEIGHT - _TOP - _BOTTOM), 2)


def _sample(*shapes: Html) -> Html:
    return tag("svg", shapes, viewBox="0 0 18 14", aria_hidden="true")


LEGEND = tag(
    "ul",
    tag("li", _sample(tag("rect", x=4, y=2, width=10, height=12, class_="bar")), "prompt"),
    tag("li", _sample(tag("rect", x=4, y=2, width=10, height=12, class_="more")), "answer"),
    tag("li", _sample(tag("line", x1=0, y1=7, x2=18, y2=7, class_="client")), "conversation as the client sends it"),
    tag("li", _sample(tag("path", d="M4 3h10l-5 9z", class_="compact")), "compacted"),
    tag("li", _sample(tag("circle", cx=9, cy=7, r=5, class_="restart")), "restart in mid-answer"),
    class_="legend",
)


ALL = "*"


def settings_section(content: Content) -> Html:
    """The settings that can be changed at run time; without controls for whoever may not write."""
    may_write = content.may_write
    explanation = (
        "A change counts at once, for new requests, in all workers of this proxy, and comes before config.yaml. "
        "A deployment's own settings (model_info.compaction) come before both."
        if may_write
        else "Only proxy administrators may change these."
    )
    fields = [_field(field, may_write=may_write) for field in content.fields]
    any_changed = any(field.changed for field in content.fields)
    parts = [
        tag("h2", "Settings", id="settings"),
        tag("p", explanation, class_="quiet"),
    ]
    if not may_write:
        return tag("section", parts, tag("div", fields, class_="fields"), aria_labelledby="settings")
    actions = tag(
        "div",
        tag("button", "Save", class_="main"),
        tag("button", "Reset all to config.yaml", name="reset", value=ALL, form="reset-form") if any_changed else None,
        class_="actions",
    )
    return tag(
        "section",
        parts,
        # Apart, so that Enter in a field saves and never resets.
        tag("form", _hidden(content, "reset"), id="reset-form", method="post"),
        tag(
            "form",
            _hidden(content, "save"),
            tag("div", fields, class_="fields"),
            actions,
            id="settings-form",
            method="post",
            novalidate=True,
        ),
        aria_labelledby="settings",
    )


def sign_out_form(content: Content) -> Html | None:
    """A button, where there is a session to end."""
    if not content.is_signed_in:
        return None
    return tag("form", _hidden(content, "sign_out"), tag("button", "Sign out", class_="small"), method="post")


def _hidden(content: Content, what: str) -> Html:
    return joined(
        tag("input", type="hidden", name=name, value=value)
        for name, value in (("do", what), ("token", content.token), ("revision", content.revision))
    )


def _field(field: Field, *, may_write: bool) -> Html:
    about = [f"{field.key}-about"]
    notes = [tag("p", field.description, id=about[0])]
    if field.problem:
        about.append(f"{field.key}-problem")
        notes.append(tag("p", field.problem, id=about[-1], class_="bad"))
    if field.changed:
        about.append(f"{field.key}-changed")
        text = f"config.yaml says {field.configured}, changed here to {_shown(field)} at {field.changed}."
        notes.append(tag("p", text, id=about[-1], class_="note"))
    else:
        notes.append(tag("p", f"config.yaml or default: {field.configured}."))
    if not may_write:
        notes.insert(0, tag("p", _shown(field), class_="note"))
        return tag("div", tag("strong", field.label), notes, class_="field changed" if field.changed else "field")
    if field.changed:
        notes.append(
            tag(
                "button",
                "Reset",
                class_="small",
                name="reset",
                value=field.key,
                form="reset-form",
                aria_label=f"Reset {field.label}",
            )
        )
    control = _control(field, " ".join(about))
    heading = tag("label", field.label, for_=field.key)
    return tag("div", heading, control, notes, class_="field changed" if field.changed else "field")


def _control(field: Field, about: str) -> Html:
    invalid = "true" if field.problem else None
    if field.options:
        options = [tag("option", label, value=value, selected=value == field.value) for value, label in field.options]
        return tag("select", options, id=field.key, name=field.key, aria_describedby=about, aria_invalid=invalid)
    return tag(
        "input",
        id=field.key,
        name=field.key,
        value=field.value,
        inputmode="decimal",
        autocomplete="off",
        aria_describedby=about,
        aria_invalid=invalid,
    )


def _shown(field: Field) -> str:
    return next((label for value, label in field.options if value == field.value), field.value)


_TITLE = "Context compaction"


def page(content: Content) -> str:
    """The settings and history page."""
    who = tag("span", f"Signed in as {content.role or 'a key without a role'}", class_="quiet")
    return _document(
        tag("header", tag("h1", _TITLE), tag("div", who, sign_out_form(content), class_="who")),
        tag(
            "main",
            [_notice(notice) for notice in content.notices],
            settings_section(content),
            _section("deployments", "Guarded deployments", deployments_table(content.rows)),
            _section("conversations", "Conversations", _plots(content)),
            _section("events", "Compactions and refusals", events_table(content.events, sees_all=content.sees_all)),
        ),
        tag(
            "footer",
            tag("p", "Times are UTC. Sizes are tokens. No text of a conversation is kept here.", class_="quiet"),
        ),
    )


def sign_in_page(problem: str = "") -> str:
    """The form for a key, for browsers that have none yet."""
    form = tag(
        "form",
        tag("input", type="hidden", name="do", value="sign_in"),
        tag("label", "Key of this LiteLLM proxy", for_="key"),
        tag(
            "input",
            id="key",
            name="key",
            type="password",
            autocomplete="off",
            required=True,
            autofocus=True,
            aria_describedby="about",
        ),
        tag(
            "p",
            "The master key and keys of proxy administrators may change settings; every other key shows what its own "
            "team, user or key has done.",
            id="about",
            class_="quiet",
        ),
        tag("div", tag("button", "Sign in", class_="main"), class_="actions"),
        method="post",
    )
    notice = _notice(Notice(kind="problem", text=problem)) if problem else None
    return _document(tag("main", tag("h1", _TITLE), notice, form, class_="narrow"))


def plain_page(text: str) -> str:
    """One sentence, and the way back."""
    notice = _notice(Notice(kind="problem", text=text))
    back = tag("p", tag("a", "Back to the page", href="?"))
    return _document(tag("main", tag("h1", _TITLE), notice, back, class_="narrow"))


def _document(*body: Child) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", _TITLE),
        tag("style", raw(STYLE)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def _section(name: str, title: str, *children: Child) -> Html:
    return tag("section", tag("h2", title, id=name), *children, aria_labelledby=name)


def _notice(notice: Notice) -> Html:
    return tag("p", notice.text, class_=f"notice {notice.kind}", role="alert" if notice.kind == "problem" else "status")


def _plots(content: Content) -> Html:
    if not content.talks:
        text = "None yet. Each conversation is drawn from its first request on, for 30 days."
        return tag("p", text, class_="quiet")
    text = (
        "How full the window was with each turn of the last conversations: prompt and answer. "
        "Dashed lines: where a prompt is compacted, where a running answer is carried over."
    )
    more = (
        tag("p", f"{content.more_talks} more are not drawn: older ones, or of one turn.", class_="quiet")
        if content.more_talks
        else None
    )
    return joined(
        [
            tag("p", text, class_="quiet"),
            tag("div", [plot(talk) for talk in content.talks], class_="plots"),
            LEGEND,
            more,
        ]
    )
