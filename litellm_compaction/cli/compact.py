"""`litellm-compaction compact`: what the plug-in would make of a conversation in a file, or makes of it.

What was done with each message is told as lines for people and as JSON for programs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import httpx

from litellm_compaction.cli.chat_server import chat_server
from litellm_compaction.config import Settings, settings_from
from litellm_compaction.core.clearing import superseded_reads, with_data
from litellm_compaction.core.compaction import Compaction, edited_part
from litellm_compaction.core.cut_points import pinned_positions
from litellm_compaction.core.messages import (
    JsonObject,
    JsonValue,
    Message,
    Request,
    parse_message,
    system_prefix_length,
)
from litellm_compaction.core.plan import Edit, Prune, Summarize
from litellm_compaction.core.strategies import STRATEGIES, chooses
from litellm_compaction.engine import (
    Attempts,
    CompactionNeeded,
    Compactor,
    PreparedRequest,
    PruningModel,
    RequestContext,
)
from litellm_compaction.errors import ConfigError
from litellm_compaction.events import CompactionEvent, Event, harmless
from litellm_compaction.stores import MemoryStore
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Windows

Fate: TypeAlias = Literal["kept", "edited", "summarized", "dropped", "offered"]
# Why nothing is done, else as `Compaction.rung`.
Decided: TypeAlias = str

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
    lead, covered = system_prefix_length(messages), compaction.covered_messages
    rest = messages[lead:]
    replaced = compaction.replaced_messages
    shown = edited_part(rest, compaction)
    repeated = superseded_reads(rest[:covered])

    def fate(position: int) -> Fate:
        if position >= covered or position in compaction.pinned:
            return "kept"
        if position >= replaced and dry_run and chooses(compaction.rung) and not rest[position].is_system:
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
    yield _DONE[report.decided] if report.decided in _DONE else STRATEGIES[report.decided].description
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


_DEFAULT_API_BASE = "http://127.0.0.1:1234/v1"
_PROGRESS_S = 1.0
_STORE_BYTES = 1 << 30

_Result = TypeVar("_Result")


class Options(NamedTuple):
    """The command's options, as `app.py` reads them; None follows the plug-in's default."""

    model: str
    window_tokens: int
    strategy: str | None
    keep_recent: int | None
    api_base: str | None
    dry_run: bool
    json: bool
    output: Path | None


class _Body(NamedTuple):
    """A request as it was read: all its fields, and what the engine needs of it."""

    fields: JsonObject
    request: Request


def compact(source: str, options: Options, environ: Mapping[str, str]) -> int:
    """Prints what is done with the request in `source` ("-": stdin), and writes the new one where asked; 0.

    Raises:
        ConfigError: the source is no request, the output cannot be written, or an option is wrong.
        DoesNotFit: the messages that stay verbatim are larger than the window.
        ServerUnavailable: there is no server to write the summary, or it does not do.
    """
    if options.dry_run and options.output:
        raise ConfigError("--dry-run makes no new request that -o could write; leave one of them out")
    body = _read(source)
    report = asyncio.run(_compacted(body.request, options, environ))
    messages = body.request.messages if report.messages is None else report.messages
    fields: dict[str, JsonValue] = {**body.fields, "messages": [message.raw for message in messages]}
    if options.output:
        _write(options.output, json.dumps(fields, indent=2) + "\n")
    if options.json:
        print(json.dumps(as_json(report, None if options.dry_run else fields)))
    else:
        print("\n".join(map(harmless, as_lines(report))))
    return 0


async def _compacted(request: Request, options: Options, environ: Mapping[str, str]) -> Report:
    settings = _settings(options)
    events: list[CompactionEvent] = []

    def note(event: Event) -> None:
        if isinstance(event, CompactionEvent):
            events.append(event)

    store = MemoryStore(ttl_s=settings.store_ttl_s, max_bytes=_STORE_BYTES)
    windows = Windows(cache_s=settings.window_cache_s)
    compactor = Compactor(windows=windows, counter=TokenCounter(), store=store, observers=(note,))
    try:
        # The environment's web proxy must not be asked for a server on this machine or network.
        async with httpx.AsyncClient(trust_env=False) as http:
            case = _case(options, settings, http, environ)
            prepared = await _shown(compactor.prepare(request, case), f"counting for {options.model}")
            if isinstance(prepared, PreparedRequest):
                return _untouched(request, prepared, options)
            decision = prepared.decision
            if options.dry_run:
                return _report(prepared, options, _planned(prepared), decision.predicted_tokens, dry_run=True)
            asking = "editing" if isinstance(decision, Edit) else f"asking {options.model} for a summary"
            guarded = await _shown(compactor.finish(prepared), asking)
            event = events[-1] if events else None
            applied = _applied(prepared, event, [stored.compaction for stored in await store.compactions()])
            return _report(prepared, options, applied, guarded.count.tokens, guarded=guarded, event=event)
    finally:
        await compactor.aclose()


def _settings(options: Options) -> Settings:
    chosen = {"strategy": options.strategy, "keep_recent_messages": options.keep_recent}
    return settings_from({key: value for key, value in chosen.items() if value is not None})


def _case(options: Options, settings: Settings, http: httpx.AsyncClient, environ: Mapping[str, str]) -> RequestContext:
    target = Target(
        key=options.model,
        model=options.model,
        api_base=None,
        api_key=None,
        context_length=options.window_tokens,
        is_lmstudio=False,
    )
    ask = chat_server(
        http,
        options.api_base or environ.get("LM_STUDIO_API_BASE") or _DEFAULT_API_BASE,
        environ.get("LM_STUDIO_API_KEY"),
        options.model,
        timeout_s=settings.summary_timeout_s,
    )
    return RequestContext(
        label=options.model,
        target=target,
        settings=settings,
        scope="",
        pruning_models=(PruningModel(label=options.model, target=target, ask=ask, is_same=True),),
        warm_up=_nothing,
        attempts=Attempts(summary_calls_left=settings.max_summary_calls),
    )


def _untouched(request: Request, guarded: PreparedRequest, options: Options) -> Report:
    return Report(
        model=options.model,
        window_tokens=options.window_tokens,
        originals=request.messages,
        sizes=guarded.count.sizes,
        fixed_tokens=guarded.count.tools_tokens + guarded.count.overhead_tokens,
        compaction=None,
        decided="gains_nothing" if guarded.budget.triggers(guarded.count.tokens) else "below_trigger",
        tokens_after=guarded.count.tokens,
        dry_run=options.dry_run,
    )


def _report(
    pending: CompactionNeeded,
    options: Options,
    compaction: Compaction,
    tokens_after: int,
    *,
    guarded: PreparedRequest | None = None,
    event: CompactionEvent | None = None,
    dry_run: bool = False,
) -> Report:
    conversation = pending.work.conversation
    return Report(
        model=options.model,
        window_tokens=options.window_tokens,
        originals=conversation.messages,
        sizes=conversation.sizes,
        fixed_tokens=conversation.fixed_tokens,
        compaction=compaction,
        decided=compaction.rung,
        tokens_after=tokens_after,
        dry_run=dry_run,
        messages=guarded.messages if guarded else None,
        event=event,
    )


def _planned(pending: CompactionNeeded) -> Compaction:
    """The compaction that would be made, without its texts."""
    decision = pending.decision
    if isinstance(decision, Edit | Prune):
        return decision.compaction
    return _covering(pending, decision.covered_messages, decision)


def _applied(pending: CompactionNeeded, event: CompactionEvent | None, stored: list[Compaction]) -> Compaction:
    """The compaction that was made: as stored, or the bare one, which no store gets."""
    covered = event.covered_messages if event else 0
    rung = event.rung if event else "truncate"
    same = (each for each in stored if (each.covered_messages, each.rung) == (covered, rung))
    return next(same, None) or _covering(pending, covered, None)


def _covering(pending: CompactionNeeded, covered: int, decision: Summarize | None) -> Compaction:
    conversation = pending.work.conversation
    rung = "truncate" if decision is None or decision.provisional else decision.strategy
    pinned = pinned_positions(conversation.messages, covered)
    return Compaction(
        covered_messages=covered,
        covered_hash=conversation.hashes[covered],
        pinned=pinned,
        stubbed=with_data(conversation.messages[system_prefix_length(conversation.messages) :], pinned),
        round=1,
        segments=(),
        ledger="",
        rung=rung,
    )


async def _nothing() -> None:
    """There is no model to warm up."""


async def _shown(work: Awaitable[_Result], doing: str) -> _Result:
    """The result of `work`; from a second on stderr says every few seconds what takes so long."""
    task = asyncio.ensure_future(work)
    started_s = time.monotonic()
    wait_s = _PROGRESS_S
    try:
        while not (await asyncio.wait({task}, timeout=wait_s))[0]:
            print(f"{doing} … {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
            wait_s = min(2 * wait_s, 10.0)
        return task.result()
    finally:
        task.cancel()


def _read(source: str) -> _Body:
    name = "stdin" if source == "-" else source
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        body = json.loads(raw.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON in UTF-8 ({type(error).__name__})") from error
    fields = {"messages": body} if isinstance(body, list) else body
    if not isinstance(fields, dict) or not isinstance(fields.get("messages"), list) or not fields["messages"]:
        raise ConfigError(f'{name} must hold {{"messages": [...], "tools": [...]}}, or a list of messages, not empty')
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise ConfigError(f"{name}: tools must be a list, not {type(tools).__name__}")
    messages = tuple(_message(name, index, raw) for index, raw in enumerate(fields["messages"]))
    request = Request(messages=messages, tools=tuple(tools), tool_choice=fields.get("tool_choice"))
    return _Body(fields, request)


def _message(name: str, index: int, raw: object) -> Message:
    if not isinstance(raw, dict):
        raise ConfigError(f"{name}: messages[{index}] is not an object but {type(raw).__name__}")
    try:
        return parse_message(raw)
    except ValueError as error:
        raise ConfigError(f"{name}: messages[{index}] is {error}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
