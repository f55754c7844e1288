"""`litellm-compaction compact`: compacts a conversation in a file as the plug-in would, or plans it (dry run)."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from litellm_compaction.cli.requests import BadRequest, read_request
from litellm_compaction.cli.servers import ChatServer
from litellm_compaction.config import Settings, settings_from
from litellm_compaction.core.clearing import superseded_reads, with_data
from litellm_compaction.core.compaction import Compaction, as_stubs, edited_part
from litellm_compaction.core.messages import JsonObject, JsonValue, Message, Request, system_prefix_length
from litellm_compaction.core.plan import Edit, Summarize
from litellm_compaction.core.strategies import STRATEGIES, chooses
from litellm_compaction.engine import CompactionNeeded, Compactor, PreparedRequest
from litellm_compaction.errors import ConfigError
from litellm_compaction.events import CompactionEvent, Event, harmless
from litellm_compaction.library.model import Model
from litellm_compaction.proxy.config_check import API_BASE_VARIABLE
from litellm_compaction.stores import memory_store
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.lmstudio import DEFAULT_API_BASE
from litellm_compaction.windows.windows import Windows

Fate: TypeAlias = Literal["kept", "edited", "summarized", "dropped", "offered"]

_PROGRESS_S = 1.0
_STORE_BYTES = 1 << 30
_Result = TypeVar("_Result")

_DONE = {
    "below_trigger": "Nothing to do: with room for the answer it stays below 80 % of the window.",
    "gains_nothing": "Nothing to do: no cut would gain enough, and it fits.",
    "edit": "Old tool results give way to one line each; no summary is needed.",
    "truncate": "The older part is dropped but for what the record quotes verbatim.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of the command.

    Attributes:
        originals: n, as they were read; sizes[i] are the tokens of originals[i].
        fixed_tokens: of tools, and of the template's additions.
        decided: `Compaction.level`, or the reason for doing nothing.
        tokens_after: of the new prompt; in a dry run its bound.
        compaction: None for none; in a dry run without its texts.
        messages: None for `originals`.
        event: None in a dry run.
    """

    model: str
    window_tokens: int
    originals: Sequence[Message]
    sizes: Sequence[int]
    fixed_tokens: int
    decided: str
    tokens_after: int
    dry_run: bool
    compaction: Compaction | None = None
    messages: Sequence[Message] | None = None
    event: CompactionEvent | None = None

    @property
    def tokens_before(self) -> int:
        return self.fixed_tokens + sum(self.sizes)

    @property
    def fates(self) -> list[Fate]:
        """One for each message.

        `edited` is sent in its place, but shorter. `dropped` leaves at most quotations: old reads that a later one
        repeats, and everything covered if there is no summary. In a dry run a pruning model would choose from
        `offered`.
        """
        compaction = self.compaction
        if compaction is None:
            return ["kept"] * len(self.originals)
        prefix = system_prefix_length(self.originals)
        covered, replaced = compaction.covered_messages, compaction.replaced_messages
        rest = self.originals[prefix:]
        shown = edited_part(rest, compaction)
        repeated = superseded_reads(rest[:covered])

        def fate(position: int) -> Fate:
            if position >= covered or position in compaction.pinned:
                return "kept"
            if position < replaced:
                return "dropped" if compaction.level == "truncate" or position in repeated else "summarized"
            if self.dry_run and chooses(compaction.level) and not rest[position].is_system:
                return "offered"
            sent = shown[position - replaced]
            return "dropped" if sent is None else "kept" if sent is rest[position] else "edited"

        system: list[Fate] = ["kept"] * prefix
        return [*system, *map(fate, range(len(rest)))]


def as_lines(report: Report) -> Iterator[str]:
    """For people: numbers and roles, no text of the conversation."""
    yield (
        f"{len(report.originals)} messages, {report.tokens_before:,} tokens, "
        f"for {report.model} with {report.window_tokens:,}."
    )
    yield _DONE[report.decided] if report.decided in _DONE else STRATEGIES[report.decided].description
    yield ""
    yield f"{'messages':>11}  {'tokens':>9}"
    if report.fixed_tokens:
        yield f"{'template':>11}  {report.fixed_tokens:>9,}  kept, tools included"
    for numbers, tokens, what in _runs(report):
        yield f"{numbers:>11}  {tokens:>9,}  {what}"
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


def document(report: Report, request: JsonObject | None) -> dict[str, JsonValue]:
    """For programs; `request` is the new request, None in a dry run."""
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
            for message, size, fate in zip(report.originals, report.sizes, report.fates, strict=True)
        ],
        "summary_calls": event.summary_calls if event else 0,
        "summary_ms": round(event.summary_ms) if event else 0,
        "reason": event.reason if event else "",
        "request": request,
    }


def _runs(report: Report) -> Iterator[tuple[str, int, str]]:
    """Numbers from 1, tokens, and a fate; calls between edited results share a line with them."""
    found = report.fates
    edited = [at for at, fate in enumerate(found) if fate == "edited"]
    between = range(edited[0], edited[-1]) if edited else range(0)
    shown: list[Fate] = ["edited" if at in between else fate for at, fate in enumerate(found)]
    for fate, neighbours in groupby(range(len(found)), key=shown.__getitem__):
        span = list(neighbours)
        kept = sum(found[at] == "kept" for at in span)
        aside = f", {kept} of them kept" if fate == "edited" and kept else ""
        numbers = f"{span[0] + 1}" if len(span) == 1 else f"{span[0] + 1}–{span[-1] + 1}"
        yield numbers, sum(report.sizes[at] for at in span), f"{fate}{aside}"


def compact(
    file: str,
    *,
    model: str,
    window: int,
    strategy: str | None,
    keep_recent: int | None,
    api_base: str | None,
    dry_run: bool,
    as_json: bool,
    output: Path | None,
    environ: Mapping[str, str],
) -> int:
    """Prints a report on the request in `file` ("-": stdin), and writes the new one to `output`; 0.

    Args:
        window: in tokens.
        strategy, keep_recent: None follows the plug-in's default.

    Raises:
        BadRequest: the file is no request.
        ConfigError: the output cannot be written, or an option is wrong.
        DoesNotFit: the messages that stay verbatim are larger than the window.
        ServerUnavailable: there is no server to write the summary, or its summary cannot be used.
    """
    if dry_run and output:
        raise ConfigError("--dry-run makes no new request that -o could write; leave one of them out")
    asked = read_request(file)
    if not asked.request.messages:
        raise BadRequest(f"{file}: messages: expected at least one")
    chosen = {"strategy": strategy, "keep_recent_messages": keep_recent}
    settings = settings_from({key: value for key, value in chosen.items() if value is not None})
    server = ChatServer(
        api_base or environ.get(API_BASE_VARIABLE) or DEFAULT_API_BASE, environ.get("LM_STUDIO_API_KEY")
    )
    report = asyncio.run(_compacted(asked.request, model, window, settings, server, dry_run=dry_run))
    messages = asked.request.messages if report.messages is None else report.messages
    fields: dict[str, JsonValue] = {**asked.fields, "messages": [message.raw for message in messages]}
    if output:
        try:
            output.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{output} cannot be written: {error.strerror or error}") from error
    if as_json:
        print(json.dumps(document(report, None if dry_run else fields)))
    else:
        print("\n".join(map(harmless, as_lines(report))))
    return 0


async def _compacted(
    request: Request, model: str, window_tokens: int, settings: Settings, server: ChatServer, *, dry_run: bool
) -> Report:
    events: list[Event] = []
    store = memory_store(ttl_s=settings.store_ttl_s, max_bytes=_STORE_BYTES)
    windows = Windows(cache_s=settings.window_cache_s)
    compactor = Compactor(windows=windows, counter=TokenCounter(), store=store, observers=(events.append,))
    context = Model(model, server.completion(settings.summary_timeout_s)).context(window_tokens, settings)
    report = partial(Report, model=model, window_tokens=window_tokens, dry_run=dry_run)
    try:
        needed = await _shown(compactor.prepare(request, context), f"counting for {model}")
        if isinstance(needed, PreparedRequest):
            count = needed.count
            return report(
                originals=request.messages,
                sizes=count.sizes,
                fixed_tokens=count.tools_tokens + count.overhead_tokens,
                decided="gains_nothing" if needed.budget.triggers(count.tokens) else "below_trigger",
                tokens_after=count.tokens,
            )
        talk, decision = needed.measured.conversation, needed.levels[0]
        report = partial(report, originals=talk.messages, sizes=talk.sizes, fixed_tokens=talk.fixed_tokens)
        if dry_run:
            plan = (
                _covering(needed, decision.covered_messages, decision)
                if isinstance(decision, Summarize)
                else decision.compaction
            )
            return report(compaction=plan, decided=plan.level, tokens_after=decision.predicted_tokens)
        asked = "editing" if isinstance(decision, Edit) else f"asking {model} for a summary"
        made = await _shown(compactor.finish(needed), asked)
        event = next((each for each in reversed(events) if isinstance(each, CompactionEvent)), None)
        done = _applied(needed, event, [stored.compaction for stored in await store.compactions()])
        return report(
            compaction=done, decided=done.level, tokens_after=made.count.tokens, messages=made.messages, event=event
        )
    finally:
        await compactor.aclose()


def _applied(needed: CompactionNeeded, event: CompactionEvent | None, stored: list[Compaction]) -> Compaction:
    """The compaction that was made: as stored, or the bare one, which no store gets."""
    made = (event.covered_messages, event.rung) if event else (0, "truncate")
    same = (each for each in stored if (each.covered_messages, each.level) == made)
    return next(same, None) or _covering(needed, made[0], None)


def _covering(needed: CompactionNeeded, covered: int, decision: Summarize | None) -> Compaction:
    conversation = needed.measured.conversation
    level = "truncate" if decision is None or decision.provisional else decision.strategy
    pinned = conversation.pinned(covered)
    return Compaction(
        covered_messages=covered,
        covered_hash=conversation.hashes[covered],
        pinned=pinned,
        shown=as_stubs(with_data(conversation.rest, pinned)),
        round=1,
        segments=(),
        ledger="",
        level=level,
    )


async def _shown(measured: Awaitable[_Result], doing: str) -> _Result:
    """The result of `measured`; after a second stderr tells every few seconds what takes so long."""
    task = asyncio.ensure_future(measured)
    started_s = time.monotonic()
    wait_s = _PROGRESS_S
    try:
        while not (await asyncio.wait({task}, timeout=wait_s))[0]:
            print(f"{doing} … {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
            wait_s = min(2 * wait_s, 10.0)
        return task.result()
    finally:
        task.cancel()
