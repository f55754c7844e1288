"""One request on its way through the engine: what comes in, what is measured, what goes out. Data only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from litellm_compaction.config import Settings
from litellm_compaction.core.budget import MARGIN_MIN_TOKENS, Budget, CompactionOptions, Rules
from litellm_compaction.core.compaction import Compaction, keyed
from litellm_compaction.core.go_on import Partial, Way
from litellm_compaction.core.messages import JsonValue, Message, Request, open_round_start, with_text
from litellm_compaction.core.plan import Step
from litellm_compaction.core.prompts import STRATEGIES
from litellm_compaction.core.secrets import Redact, redactor
from litellm_compaction.core.view import View
from litellm_compaction.errors import DoesNotFit
from litellm_compaction.events import Outcome, Phase
from litellm_compaction.tokenizers.families import Family, no_thinking_switch
from litellm_compaction.tokenizers.registry import is_loaded, vocabulary
from litellm_compaction.tokens.begun import BegunPrompt
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.windows import Target, Window

# What was done to a request, as clients may be told.
Action: TypeAlias = Literal["none", "reused", "compacted"]
# Has a server count a request's prompt, by an answer of one token; gives None if it does not say, and never raises.
Measure: TypeAlias = Callable[[Request], Awaitable[int | None]]
# Every prompt takes more of a window (numbers are divided by it); and any prompt may that leaves room for its answer.
_PRESSED_RATIO, _RELAXED_RATIO = 1e-6, 1.0


async def nothing() -> None:
    """Stands for a model that is not loaded."""


@dataclass(slots=True)
class Attempts:
    """The budget of one client request, over all its phases, retries and fallbacks (promise P5)."""

    summary_calls_left: int
    told_hash: str = ""  # The covered hash of the compaction that an event last told of.
    questions_left: int = 8  # How often a part or all of it may still be sent to be counted only.
    has_compacted: bool = False  # The compaction that the client wanted at once is made.
    # Makes the error if anything of ours fails now: it may not be sent as it came by the newest count (promise P8).
    too_long: Callable[[], DoesNotFit] | None = field(default=None, compare=False)


@dataclass(slots=True, kw_only=True)
class Effort:
    """The cost of a compaction, filled on the way."""

    calls: int = 0  # Of models, and their seconds.
    seconds: float = 0.0
    pruning_model: str = ""  # The last one that was asked.
    reason: str = ""  # In one word, why there is no summary, or not the configured model's.


class Decision(NamedTuple):
    """Told to observers of a request: what was done, at which cost, and what a new record continues."""

    outcome: Outcome
    effort: Effort | None = None
    base: Compaction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryAnswer:
    """A pruning model's answer; `calls_tool` if it called a tool, with or without words."""

    text: str
    reasoning: str = ""
    finish_reason: str = "stop"
    calls_tool: bool = False


# One call of a pruning model with messages, `max_tokens=`, and `tools=` and `tool_choice=` of the client's if these are
# the conversation's own (append mode); raises `SummaryFailed` for every failure, and lets cancellation pass.
Ask: TypeAlias = Callable[..., Awaitable[SummaryAnswer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningModel:
    """A model that writes summaries; `is_same` if it is the one that the client asked. `label` is its name in logs."""

    label: str
    target: Target
    ask: Ask
    is_same: bool

    async def quiet_ask(self, messages: Sequence[Message], **options: Any) -> SummaryAnswer:
        """`ask`, told not to think first if the model has a word for that."""
        if switch := no_thinking_switch(self.target.model):
            messages = (*messages[:-1], with_text(messages[-1], f"{messages[-1].text} {switch}"))
        return await self.ask(messages, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """A request's surroundings, all in which requests differ; two are equal if the same is decided for both."""

    label: str  # The model's name in logs and errors.
    target: Target
    settings: Settings  # In force for the target.
    scope: str  # Of the clients that may share a stored compaction (promise P9).
    pruning_models: tuple[PruningModel, ...] = field(compare=False)  # In the order in which they are tried.
    warm_up: Callable[[], Awaitable[None]] = field(compare=False)  # Makes LM Studio load the model.
    attempts: Attempts  # Shared by all phases of one client request.
    measure: Measure | None = field(default=None, compare=False)  # None if no server may be asked.
    # Says if its owner may have a model called while no client waits; None if nothing is written ahead.
    may_write_ahead: Callable[[], Awaitable[bool]] | None = field(default=None, compare=False)
    has_siblings: bool = False  # Other processes ask the same servers: this one sees them only in shared contexts.
    asked_tokens: int | None = None  # The client's limit for the answer.
    tenant: str = ""  # Fingerprint of the client, for events.
    now: bool = False  # The client wants a compaction before it is answered, whatever the fill.
    focus: str = ""  # The topic that a summary is to keep in detail, in the client's words: untrusted data.
    pins: tuple[str, ...] | None = None  # Words of messages that stay verbatim at its wish; None for no word.
    # The client asks for a summary that it goes on with, or beside a conversation: nothing that fits is taken from it,
    # no model is asked, and nothing is kept of it.
    is_client_summary: bool = False
    is_beside: bool = False  # Its conversation goes on as if it had not asked; what is written ahead begins after it.
    goes_on: bool = False  # It makes the model go on with an answer, and starts none.
    carries_calls: bool = False  # Whoever carries the answer can answer a call of it, unseen by the client.
    portable: tuple[Compaction, ...] = ()  # The record that the client's conversation begins with.
    threshold_tokens: int = 0  # The client wants a longer prompt compacted, if that is below the trigger.
    writes_whole_records: bool = False  # As `CompactionOptions` has it.
    may_change: bool = True  # Otherwise the client wants its conversation refused rather than compacted.
    refusal: str = ""  # How the server has just refused the request as too long, as in events.
    trigger_ratio: float | None = None  # In place of all lines of the settings, if it is not None.
    room_tokens: int = 0  # Nothing fits that leaves less for an answer.

    @property
    def is_wanted(self) -> bool:
        """A compaction is still to be made because the client wants it."""
        return self.now and not self.attempts.has_compacted

    def pressed(self, refusal: str) -> RequestContext:
        """The same with a compaction in any case: the server has shown that our estimate is no guide here."""
        return replace(self, trigger_ratio=_PRESSED_RATIO, refusal=refusal)

    def relaxed(self) -> RequestContext:
        """The same with a compaction only if there is no other way: an answer was stopped, but not for room."""
        return replace(self, trigger_ratio=_RELAXED_RATIO, threshold_tokens=0)

    def rules(self, *, reasons: bool) -> Rules:
        """The budget's rules; a model that `reasons` before it answers needs more room."""
        settings, constants, ratio = self.settings, self.settings.constants, self.trigger_ratio
        answer_tokens = constants.reasoning_answer_min_tokens if reasons else constants.answer_min_tokens
        return Rules(
            pre_request_ratio=settings.pre_request_ratio if ratio is None else ratio,
            streaming_ratio=settings.streaming_ratio,
            target_ratio=settings.target_ratio,
            output_buffer_ratio=constants.output_buffer_ratio,
            output_buffer_min_tokens=constants.output_buffer_min_tokens,
            answer_min_tokens=max(answer_tokens, self.room_tokens),
            threshold_tokens=settings.threshold_tokens if ratio is None else 0,
            reserve_tokens=0 if ratio == _RELAXED_RATIO else settings.reserve_tokens,
            keeps_what_fits=self.is_client_summary,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRequest:
    """A measured request: its sizes, its window, its budget."""

    context: RequestContext
    request: Request
    conversation: View
    count: Estimate
    budget: Budget
    window: Window
    family: Family
    is_long: bool = False  # A walk over its messages takes some ms.
    whole_tokens: int = 0  # Of what came, if its messages are excerpts of the client's, to be sent in any case.
    # Of the part that no compaction can shrink, as a request of its own, if the server was asked for it.
    floor_count: Estimate | None = None
    started_s: float  # Of the compactor's monotonic clock.

    @property
    def count_text(self) -> Callable[[str], int]:
        return self.conversation.count_text

    @property
    def redact(self) -> Redact:
        """Takes secrets out of a text, by the settings."""
        return redactor(self.context.settings.redact_patterns)

    @property
    def defuse(self) -> Redact:
        """Breaks the model's control tokens in a text; which it has, only its own vocabulary knows."""
        name = self.family.vocabulary
        return vocabulary(name).defused if is_loaded(name) else str

    @property
    def is_shortened(self) -> bool:
        return self.whole_tokens > 0

    @property
    def tokens_before(self) -> int:
        return self.whole_tokens or self.count.tokens

    @property
    def options(self) -> CompactionOptions:
        context, settings, constants = self.context, self.context.settings, self.context.settings.constants
        return CompactionOptions(
            keep_recent_messages=settings.keep_recent_messages,
            summary_max_tokens=constants.summary_max_tokens,
            # Lines in place of results know no topic.
            edits=constants.clear_tool_results and not context.focus,
            strategy=STRATEGIES[settings.strategy],
            keep_images=constants.keep_images,
            writes_whole_records=context.writes_whole_records,
            rereads=self.family.rereads,
        )

    def keyed(self, compaction: Compaction) -> Compaction:
        """A compaction of this request as it is stored: for the next turn, if an answer was carried over."""
        return keyed(self.conversation.messages, self.conversation.hashes, compaction)

    @property
    def is_voluntary(self) -> bool:
        """Nothing but the client's wish asks for a compaction."""
        return self.context.is_wanted and not self.budget.own.triggers(self.count.tokens)

    @property
    def phase(self) -> Phase:
        """The cause of its size: an answer outgrows it, tool results have come in, or it has just grown."""
        grown: Phase = "pre_request" if open_round_start(self.request.messages) is None else "tool_response"
        return "streaming" if self.context.goes_on else grown


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionNeeded:
    """A request that needs a new compaction by one of `steps` (as in `Make`); `stored` are the store's."""

    measured: MeasuredRequest
    steps: tuple[Step, ...]
    stored: tuple[Compaction, ...]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The way in which a server is made to go on with an answer; none for a request that starts one."""

    plan: ContinuationPlan | None = field(default=None, compare=False)  # As it was carried out.
    way: Way | None = None
    prompt: BegunPrompt | None = None  # All of it as it is to be sent, for the way `raw`.
    is_trusted: bool = False  # The server has gone on by this way before, so that it says nothing but the rest.
    # The body's fields that have the server think no more, if it knows them; None if an answer may think.
    closing: Mapping[str, JsonValue] | None = None


STARTS = Continuation()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request as it is sent; what led to it stands in `measured`."""

    action: Action
    measured: MeasuredRequest = field(compare=False, repr=False)
    messages: tuple[Message, ...] | None  # None if the client's own list stays as it is.
    count: Estimate  # Of what is sent.
    budget: Budget
    excerpts: int = 0  # How many quotations of the earlier conversation stand before the person's newest words.
    excerpt_tokens: int = 0
    # None if the client's stay; the last of them is ours, which looks up what `applied` covers.
    tools: tuple[JsonValue, ...] | None = None
    applied: Compaction | None = field(default=None, compare=False, repr=False)  # By which `messages` were made.
    continuation: Continuation = field(default=STARTS, repr=False)  # How an answer goes on.
    decision: Decision | None = field(default=None, compare=False, repr=False)  # To be told of once this is sent.

    @property
    def window(self) -> Window:
        return self.measured.window

    @property
    def tokens_before(self) -> int:
        return self.measured.tokens_before

    @property
    def count_text(self) -> Callable[[str], int]:
        return self.measured.count_text

    @property
    def compaction(self) -> Compaction | None:
        """The compaction that was applied as it is stored; None for none, and for one of which nothing is kept."""
        if self.applied is None or self.measured.context.is_client_summary:
            return None
        return self.measured.keyed(self.applied)

    @property
    def round(self) -> int:
        """Of the compaction that was applied, 0 for none."""
        return self.applied.round if self.applied is not None else 0

    @property
    def shown(self) -> str:
        """The end of the answer that the server goes on with itself; "" if the model is asked to."""
        return self.messages[-1].text if self.messages and self.continuation.way in ("raw", "prefill") else ""

    def sent(self, request: Request) -> Request:
        """Returns `request`, the client's own, with its messages and tools as they are sent."""
        messages = request.messages if self.messages is None else self.messages
        return replace(request, messages=messages, tools=request.tools if self.tools is None else self.tools)

    def max_output_tokens(self, asked_tokens: int | None, *, is_certain: bool = False) -> int:
        """Returns the upstream `max_tokens` for what the client asked (None or negative: unlimited).

        Room is left for the most that the prompt may take. `is_certain`: an answer of it ended at such a bound before,
        so that the rest is for what it is likely to take.
        """
        count, budget, window_tokens = self.count, self.budget, self.budget.window_tokens
        left_tokens = budget.max_output_tokens(count.tokens + count.unpriced_tokens, None)
        if not is_certain:
            can_ask = self.measured.context.measure is not None
            # If no server tells a number, the likely most where the other leaves less than half: it would go on often.
            is_bound = can_ask or count.text.is_confirmed or count.high <= window_tokens // 2
            margin_tokens = 0 if count.is_told or count.own.exact else MARGIN_MIN_TOKENS
            left_tokens = window_tokens - (count.high if is_bound else count.likely) - margin_tokens
        limit_tokens = budget.max_output_tokens(count.tokens, asked_tokens)
        return min(limit_tokens, max(left_tokens, budget.rules.answer_min_tokens))


# What is sent, or what has to be made first.
Decided: TypeAlias = PreparedRequest | CompactionNeeded


class ContinuationPlan(NamedTuple):
    """A way for an answer, `partial`, to go on."""

    request: Request  # The conversation as the client sent it.
    partial: Partial
    context: RequestContext
    messages: tuple[Message, ...]  # The conversation that makes the model go on, before any compaction.
    prepared: Decided  # The same as it would be sent, or what has to be made first.
    ways: tuple[Way, ...]  # In which the server goes on itself, best first; none if the model is asked to.
