"""Compacts a conversation by the engine's own compactor; the record travels in the messages, so any call goes on."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import pydantic
from pydantic import Field, NonNegativeInt

from litellm_compaction import engine
from litellm_compaction.config import Settings, StrategyName, settings_from
from litellm_compaction.core.budget import RESERVE_MAX_RATIO
from litellm_compaction.core.compaction import apply
from litellm_compaction.core.forms import excerpt
from litellm_compaction.core.messages import JsonObject, Message, Request, parse_message, system_prefix_length
from litellm_compaction.core.portable import headed, read_record
from litellm_compaction.core.prompts import STRATEGIES
from litellm_compaction.core.view import legal_cuts
from litellm_compaction.engine.ask import REQUEST_TOKENS, SummaryJob, summarize, within_s
from litellm_compaction.engine.context import (
    Attempts,
    PreparedRequest,
    PruningModel,
    RequestContext,
    SummaryAnswer,
    nothing,
)
from litellm_compaction.errors import SummaryFailed
from litellm_compaction.stores import open_store
from litellm_compaction.tokenizers.families import family_of
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.windows import Target, Windows

# The second for an image, a sound, a file: what OpenAI's vision models take for a large picture, rounded up.
_ROLE_TOKENS, _PART_TOKENS = 2, 1200
logger = logging.getLogger("litellm_compaction")

Messages: TypeAlias = Sequence[JsonObject]
_STORE_S = 86_400.0
_WINDOW_TOKENS = 128_000
# An unknown family's tokens are counted so much too high; by the middle they may be as much too low.
_ERRS_HIGH = 1.2


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its name, which says how tokens are counted, and the function that asks it for summaries.

    That takes `model=, messages=, max_tokens=, temperature=`, and answers as OpenAI's chat completions, object or dict.
    """

    name: str
    complete: Callable[..., Awaitable[Any]] = field(repr=False)

    async def ask(self, messages: Sequence[Message], *, max_tokens: int, **_: object) -> SummaryAnswer:
        """One call of the function, as the engine asks a pruning model; any failure is a `SummaryFailed`."""
        raw = [dict(message.raw) for message in messages]
        try:
            said = await self.complete(model=self.name, messages=raw, max_tokens=max_tokens, temperature=0.3)
            choice = (said if isinstance(said, Mapping) else said.model_dump())["choices"][0]
            message = choice["message"]
            return SummaryAnswer(
                text=parse_message({"role": "assistant", "content": message.get("content")}).text,
                reasoning=str(message.get("reasoning_content") or ""),
                finish_reason=choice.get("finish_reason") or "stop",
                calls_tool=bool(message.get("tool_calls")),
            )
        except Exception as error:
            raise SummaryFailed("error", f"the summariser raised {type(error).__name__}") from error


class CompactionEvent(NamedTuple):
    """A compaction: whole prompts by the engine's count, and the models' text of all rounds, "" if none was usable."""

    round: int
    tokens_before: int
    tokens_after: int
    summary_content: str
    compacted_message_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """A conversation to go on with, and the positions in the given messages that are not sent any more, ascending.

    Without an event nothing changed; `error` says why, if that failed: after a `DoesNotFit` they are too long.
    """

    compacted_messages: list[JsonObject] = field(repr=False)
    compaction_event: CompactionEvent | None = field(default=None, repr=False)
    replaced: tuple[int, ...] = ()
    error: Exception | None = None


class Compactor:
    """Keeps a session's conversation inside the window; its caller goes on with the result, or with all of it."""

    def __init__(self, model: Model, config: CompactionConfig, *, session_id: str = "") -> None:
        self._keep_last, self._family = config.recent_messages_to_keep, family_of("", model.name)
        is_known = self._family.name != "unknown"
        name, window_tokens = model.name, config.model_context_limit
        # Without an address no server is asked.
        target = Target(key=name, model=name, api_base=None, api_key=None, context_length=window_tokens)
        settings = _settings(config, is_known=is_known)
        self._context = RequestContext(
            label=name,
            target=target,
            settings=settings,
            scope=session_id,
            # Asked about the conversation as text: its server's cache is not known.
            pruning_models=(PruningModel(label=name, target=target, ask=model.ask, is_same=False),),
            warm_up=nothing,
            attempts=Attempts(summary_calls_left=settings.constants.max_summary_calls),
            measure=None if is_known else self._middle,
            writes_whole_records=True,
        )
        store = open_store("memory://", ttl_s=_STORE_S, max_bytes=1 << 24)
        self._engine = engine.Compactor(windows=Windows(cache_s=_STORE_S), counter=TokenCounter(), store=store)

    async def __call__(self, messages: Messages, *, tools: Messages = ()) -> CompactionResult:
        """As `safe_compact`, if the conversation is above the threshold by the engine's own count."""
        return await _safely(messages, self.compact(messages, tools=tools, is_wanted=False))

    async def compact(self, messages: Messages, *, tools: Messages = (), is_wanted: bool = True) -> CompactionResult:
        """As the function `compact`; what is not `is_wanted` happens only above the threshold."""
        conversation = parsed(messages)
        earlier = read_record(conversation)
        own, places = earlier.unfolded(conversation) if earlier else ([*conversation], [*range(len(conversation))])
        context = replace(
            self._context,
            now=is_wanted and bool(select_messages_to_compact(messages, self._keep_last).messages_to_compact),
            portable=(earlier.base,) if earlier else (),
            attempts=replace(self._context.attempts),
        )
        prepared = await self._engine.guard(Request(messages=tuple(own), tools=tuple(tools)), context)
        record, texts = prepared.compaction, [message.text for message in prepared.messages or ()]
        # The record that came with the messages may stand for what it has stood for, and nothing else has changed.
        is_known = earlier and record and record.record == earlier.base.record
        if not texts or (is_known and record and texts == [message.text for message in apply(own, record)]):
            return CompactionResult(compacted_messages=[*messages])
        return _result(messages, prepared, own, places)

    async def _middle(self, request: Request) -> int:
        """The count for which a server would be asked, by a counter that has learned nothing."""
        return math.ceil((await TokenCounter().count("", self._family, request)).tokens / _ERRS_HIGH)


async def compact(
    messages: Messages, session_id: str, model: Model, config: CompactionConfig, *, tools: Messages = ()
) -> CompactionResult:
    """Condenses everything but system messages and the recent ones; `should_compact` says when that is worth it.

    The summary stands in the first user message; one that the messages carry is integrated. Above the threshold one
    that fails is done without. `tools` are only counted; the caller's list and dicts are never changed. A DoesNotFit
    says what takes how many tokens if that is longer than the window, and a ValueError which entry is not a message.
    """
    return await Compactor(model, config, session_id=session_id).compact(messages, tools=tools)


async def safe_compact(
    messages: Messages, session_id: str, model: Model, config: CompactionConfig, *, tools: Messages = ()
) -> CompactionResult:
    """As `compact`, but any failure is logged, and the messages come back unchanged; cancellation passes through."""
    return await _safely(messages, compact(messages, session_id, model, config, tools=tools))


async def generate_summary(
    messages: Messages,
    previous_summary: str,
    original_task: str,
    round: int,  # noqa: A002 - the name of its specification
    model: Model,
    *,
    window_tokens: int = _WINDOW_TOKENS,
) -> str:
    """A summary of the messages, with `previous_summary` ("" for none) integrated; several calls if one has no room.

    A SummaryFailed says in its `reason` why there is none, its `__cause__` what the model's function raised.
    """
    strategy, settings = STRATEGIES["summary"], settings_from(None)
    tokens = settings.constants.summary_max_tokens
    count = TokenCounter().text_counter(model.name, family_of("", model.name))
    job = SummaryJob(
        messages=parsed(messages),
        earlier=previous_summary,
        request=excerpt(original_task, REQUEST_TOKENS, count),
        summary_tokens=tokens,
        prompt_limit_tokens=max(window_tokens - 2 * tokens, window_tokens // 2),
        round_number=round,
        strategy=strategy,
    )
    text = await within_s(summarize(job, model.ask, count), settings.summary_timeout_s)
    return f"### Session Summary (Compaction Round {round})\n\n{text}"


def _settings(config: CompactionConfig, *, is_known: bool) -> Settings:
    defaults = settings_from(None)
    errs_high = 1.0 if is_known else _ERRS_HIGH
    doubt_tokens = math.ceil(config.model_context_limit * (1 - 1 / errs_high))
    answer_tokens = max(defaults.constants.answer_min_tokens, doubt_tokens)
    update: dict[str, object] = {
        "pre_request_ratio": config.threshold_percent,
        "target_ratio": min(defaults.target_ratio, config.threshold_percent / 2),
        "reserve_tokens": config.reserved_tokens,
        "keep_recent_messages": config.recent_messages_to_keep,
        "strategy": config.strategy,
    }
    constants = replace(
        defaults.constants,
        # Room for the answer is what the caller reserves.
        output_buffer_ratio=0.0,
        output_buffer_min_tokens=0,
        answer_min_tokens=answer_tokens,
        reasoning_answer_min_tokens=answer_tokens,
        # The messages are all there is: of a line no later summary could read the result.
        clear_tool_results=False,
    )
    return defaults.model_copy(update=update).with_constants(constants)


def _result(
    messages: Messages, prepared: PreparedRequest, own: Sequence[Message], places: Sequence[int]
) -> CompactionResult:
    sent, record, prefix = prepared.messages or (), prepared.compaction, system_prefix_length(own)
    raw = [each.raw for each in sent]
    raw[prefix : prefix + 1] = [headed(each, prepared.round).raw for each in sent[prefix : prefix + 1]]
    for behind, (theirs, ours) in enumerate(zip(reversed(own), reversed(sent), strict=False), 1):
        if (theirs.role, theirs.text, theirs.calls) != (ours.role, ours.text, ours.calls):
            break
        # Also with `null` content, as it came.
        raw[-behind] = theirs.raw
    gone = {prefix + at for at in record.gone} if record is not None else set()
    replaced = tuple(sorted({places[at] for at in gone} - {place for at, place in enumerate(places) if at not in gone}))
    names = tuple(str(messages[at].get("id", at)) for at in replaced)
    text, tokens = record.summary if record else "", (prepared.tokens_before, prepared.count.tokens)
    event = CompactionEvent(prepared.round, *tokens, summary_content=text, compacted_message_ids=names)
    return CompactionResult(compacted_messages=raw, compaction_event=event, replaced=replaced)


async def _safely(messages: Messages, compacting: Awaitable[CompactionResult]) -> CompactionResult:
    try:
        return await compacting
    except Exception as error:  # noqa: BLE001 - an agent goes on without a compaction rather than not at all
        kinds = type(error).__name__, type(error.__cause__ or error).__name__
        logger.warning("library_compaction_failed error=%s cause=%s", *kinds)
        return CompactionResult(compacted_messages=[*messages], error=error)


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config={"strict": True, "extra": "forbid"})
class CompactionConfig:
    """The settings of a compaction; sizes are tokens; a bad value is a ValueError that names it.

    Attributes:
        model_context_limit: the context length with which the model is really loaded, from 1,024.
        system_reserve, output_reserve, safety_buffer: are added; none counts if less than a quarter would be left.
        threshold_percent: share of the rest at which a conversation is compacted, above 0 and at most 1.
        recent_messages_to_keep: stay verbatim if they, and the next steps, fit.
    """

    model_context_limit: Annotated[int, Field(ge=1024)] = _WINDOW_TOKENS
    system_reserve: NonNegativeInt = 2_000
    output_reserve: NonNegativeInt = 4_000
    safety_buffer: NonNegativeInt = 5_000
    threshold_percent: Annotated[float, Field(gt=0, le=1)] = 0.80
    recent_messages_to_keep: NonNegativeInt = 10
    strategy: StrategyName = "summary"

    @property
    def reserved_tokens(self) -> int:
        tokens = self.system_reserve + self.output_reserve + self.safety_buffer
        return tokens if tokens <= RESERVE_MAX_RATIO * self.model_context_limit else 0

    @property
    def threshold_tokens(self) -> int:
        """The size at which a conversation is compacted: 93,600 by default."""
        return math.floor((self.model_context_limit - self.reserved_tokens) * self.threshold_percent)


class CompactionSelection(NamedTuple):
    """A conversation divided; `previous_summary` is "" for none."""

    messages_to_compact: list[JsonObject]
    messages_to_keep: list[JsonObject]
    previous_summary: str


def estimate_tokens(text: object) -> int:
    """ceil(characters / 4), 0 for anything that is no text; about 30 % too low for code and numbers."""
    return -(-len(text) // 4) if isinstance(text, str) else 0


def estimate_messages_tokens(messages: Sequence[JsonObject]) -> int:
    """For each message 2 for its role, its text, its calls and results (as JSON); 1,200 for any other part."""
    return sum(map(_message_tokens, parsed(messages)))


def should_compact(messages: Sequence[JsonObject], config: CompactionConfig) -> bool:
    """Returns True from `config.threshold_tokens` on; False for no more than `recent_messages_to_keep + 1` messages."""
    is_short = len(messages) <= config.recent_messages_to_keep + 1
    return not is_short and estimate_messages_tokens(messages) >= config.threshold_tokens


def select_messages_to_compact(messages: Sequence[JsonObject], keep_last: int = 10) -> CompactionSelection:
    """Divides a conversation before its last `keep_last` messages, or further back, behind what opens it."""
    conversation = parsed(messages)
    record, start = read_record(conversation), system_prefix_length(conversation)
    if record is not None and record.at == start and record.rest is None:
        start += 1
    newest = len(conversation) - keep_last
    cut = max((each for each in legal_cuts(conversation) if start < each <= newest), default=start)
    kept = [*messages[:start], *messages[cut:]]
    return CompactionSelection([*messages[start:cut]], kept, record.base.summary if record else "")


def parsed(messages: Sequence[JsonObject]) -> tuple[Message, ...]:
    """The messages as the core knows them; a ValueError says which entry is none."""
    for index, raw in enumerate(messages):
        if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str):
            raise ValueError(f"messages[{index}]: expected an object with a role")  # noqa: TRY004 - as all bad shapes
    return tuple(map(parse_message, messages))


def _message_tokens(message: Message) -> int:
    content = message.raw.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    said = [part for part in parts if part.get("type") in ("tool-call", "tool-result")]
    said += [{"name": call.name, "arguments": call.arguments} for call in message.calls]
    texts = [message.text, message.reasoning, *(json.dumps(each, ensure_ascii=False, default=str) for each in said)]
    others = sum(kind not in ("tool-call", "tool-result") for kind in message.other_parts)
    return _ROLE_TOKENS + sum(map(estimate_tokens, texts)) + _PART_TOKENS * others
