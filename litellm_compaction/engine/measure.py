"""Measures requests: counts, window and budget, of what clients send and of what is sent for it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from litellm_compaction.concurrency import Flights, is_long, off_loop, off_loop_if
from litellm_compaction.core.budget import Budget
from litellm_compaction.core.compaction import Compaction, apply
from litellm_compaction.core.identity import words_chain
from litellm_compaction.core.messages import Message, Request, chain, system_prefix_length, with_every_result
from litellm_compaction.core.stretches import marked
from litellm_compaction.core.view import RECORD_TOKENS, View
from litellm_compaction.engine.additions import Recaller
from litellm_compaction.engine.context import Action, MeasuredRequest, PreparedRequest, RequestContext
from litellm_compaction.engine.sharing.leases import Leases, shared_name
from litellm_compaction.errors import OWN_TEMPLATE, ModelNotLoaded, NotServed
from litellm_compaction.tokenizers.families import Family
from litellm_compaction.tokenizers.registry import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.tokens.estimate import Estimate
from litellm_compaction.windows.windows import Window, Windows, may_cut

# Messages added to a floor that the server has counted may be larger than planned by so much.
_PLANNED_RATIO = 1.10
# Below this share of what it may fill no conversation has ever been compacted, however wrong the count was then.
COMPACTED_BEFORE_RATIO = 0.25


class RequestMeasurer:
    """Measures requests by their servers' windows and counts, and what is made of them."""

    def __init__(
        self,
        *,
        windows: Windows,
        counter: TokenCounter,
        sources: Sources,
        recaller: Recaller,
        leases: Leases | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.windows, self.counter, self._sources = windows, counter, sources
        self._leases, self._recaller, self._clock = leases, recaller, clock
        self._warm_ups: Flights[None] = Flights()

    async def measure(self, request: Request, context: RequestContext) -> MeasuredRequest:
        """Returns the request with its sizes, its window and its budget, still without hashes.

        Raises:
            WindowUnknown: no source says how large the window is.
            ModelNotLoaded: `when_not_loaded` is `error`, or the warm-up did not load the model.
            NotServed: the client brings a template; LM Studio has its own in any case.
        """
        started_s, target = self._clock(), context.target
        if request.has_own_template and not target.is_lmstudio:
            raise NotServed(OWN_TEMPLATE, "chat_template")
        window = await self.window(context)
        # Once more if the model has been loaded anew.
        for _ in range(2):
            family = self._sources.family(target, window)
            counted = self.counter.count(target.key, family, request, asker=target.asker, window_tokens=window.tokens)
            before, count = window, await counted
            window = await self.window(context, prompt_tokens=count.tokens) if may_cut(window, count.tokens) else window
            if window == before:
                break
        if request.token_ids is not None:
            count = Estimate.exactly(request.token_ids)
        make = partial(self._measured, request, context, window, family, count, started_s=started_s)
        return await off_loop_if(is_long(request.messages), make)

    def by(self, measured: MeasuredRequest, count: Estimate, request: Request | None = None) -> MeasuredRequest:
        """`measured` by another count of its request, or of one in its place, which comes again under its hashes."""
        if count is measured.count:
            return measured
        context, window, family, started_s = measured.context, measured.window, measured.family, measured.started_s
        request, before = request or measured.request, measured.conversation
        made = self._measured(request, context, window, family, count, started_s=started_s, before=before)
        return replace(made, whole_tokens=measured.whole_tokens)

    async def shortened(self, measured: MeasuredRequest, messages: tuple[Message, ...]) -> MeasuredRequest:
        """`measured` with other messages in the client's place; the client will send its own again."""
        request = replace(measured.request, messages=messages)
        made = self.by(measured, await self.count_request(measured, request), request)
        return replace(made, whole_tokens=measured.tokens_before)

    async def count_request(self, measured: MeasuredRequest, request: Request) -> Estimate:
        target, tokens = measured.context.target, measured.window.tokens
        return await self.counter.count(target.key, measured.family, request, asker=target.asker, window_tokens=tokens)

    def with_floor(self, measured: MeasuredRequest, count: Estimate) -> MeasuredRequest:
        """`measured` with sizes by which its floor takes `count`, which is of the floor as a request of its own."""
        view, budget, protected = measured.conversation, measured.budget, measured.conversation.protected
        if len(protected) == len(view.messages) == len(count.sizes) and view.floor_sizes == view.sizes:
            # Nothing of it can be covered: the floor is the request.
            return replace(self.by(measured, count), floor_count=count)
        record_tokens = RECORD_TOKENS if len(protected) < len(view.messages) else 0
        ratio = min(1.0, count.tokens / max(1, view.floor_tokens - record_tokens))
        sizes = (math.ceil(size * ratio) if at in protected else size for at, size in enumerate(view.sizes))
        view = replace(view, sizes=tuple(sizes), fixed_tokens=math.ceil(view.fixed_tokens * ratio))
        # In the result only the added part is still in doubt, as much as fits; it is counted again before it is sent.
        share = min(1.0, count.tokens / max(1, replace(budget, likely_ratio=1.0).prompt_limit_tokens))
        likely_ratio = min(budget.likely_ratio, share * count.likely_ratio + (1 - share) * _PLANNED_RATIO)
        fixed_tokens = view.prefix_tokens
        budget = replace(budget, floor=lambda: view.floor_tokens, fixed_tokens=fixed_tokens, likely_ratio=likely_ratio)
        return replace(measured, conversation=view, budget=budget, floor_count=count)

    def unchanged(self, measured: MeasuredRequest) -> PreparedRequest:
        """The request as it was measured, to be sent."""
        messages, budget = measured.request.messages if measured.is_shortened else None, measured.budget.own
        action: Action = "none" if messages is None else "compacted"
        return PreparedRequest(action=action, messages=messages, measured=measured, count=measured.count, budget=budget)

    async def applied(self, measured: MeasuredRequest, compaction: Compaction, action: Action) -> PreparedRequest:
        """The request with a compaction in place of the messages that it covers; the caller asks if that fits."""
        view, tools = measured.conversation, self._recaller.tools(measured)
        messages = await off_loop_if(measured.is_long, lambda: apply(view.messages, compaction))
        if tools is not None:
            messages = self._recaller.with_found(messages, measured, compaction.covered_messages, len(view.rest))
        # Calls at the very end are the client's business.
        end = len(messages) - bool(messages and messages[-1].calls)
        sent = (*await off_loop_if(measured.is_long, partial(with_every_result, messages[:end])), *messages[end:])
        shown = measured.request.tools if tools is None else tools
        count = await self.count_request(measured, replace(measured.request, messages=sent, tools=shown))
        # Of what was planned by a floor that the server has counted only the rest is in doubt.
        count = count.with_part(measured.floor_count)
        budget = replace(measured.budget, likely_ratio=count.likely_ratio, own_likely_ratio=None)
        if not budget.fits(count.tokens) and self._recaller.forget(measured):
            # What was looked up for an earlier answer refuses no request.
            return await self.applied(measured, compaction, action)
        made = PreparedRequest(action=action, measured=measured, messages=sent, count=count, budget=budget, tools=tools)
        return replace(made, applied=compaction)

    async def text_counter(self, context: RequestContext) -> tuple[Window, Callable[[str], int]]:
        """Returns a context's window, and its model's counter of text; errors as `measure`."""
        window, target = await self.window(context), context.target
        return window, self.counter.text_counter(target.key, self._sources.family(target, window), asker=target.asker)

    async def window(self, context: RequestContext, *, prompt_tokens: int = 0) -> Window:
        """Returns the window of a context's target by `Windows.ready`, after a warm-up if that is needed and wanted."""
        join = partial(self._warm_ups.join, context.target.key, partial(self._warm_up, context))
        load = None if context.settings.when_not_loaded == "error" else join
        return await self.windows.ready(context.target, prompt_tokens=prompt_tokens, load=load)

    async def _warm_up(self, context: RequestContext) -> None:
        """Has the model loaded, by one process: LM Studio loads it once for each that asks (its bug tracker 1751)."""

        async def loaded() -> Window | None:
            with contextlib.suppress(ModelNotLoaded):
                return await self.windows.resolve(context.target, fresh=True)
            return None

        topic = f"warm-up {shared_name(f'{context.target.api_base} {context.target.model}')}"
        leases, limit_s = self._leases, context.settings.constants.warm_up_timeout_s
        shared = contextlib.nullcontext() if leases is None else leases.one_of_all(topic, loaded, limit_s=limit_s)
        async with shared as window:
            if window is None:
                await context.warm_up()

    def _measured(
        self,
        request: Request,
        context: RequestContext,
        window: Window,
        family: Family,
        count: Estimate,
        *,
        started_s: float,
        before: View | None = None,
    ) -> MeasuredRequest:
        is_new = before is None or before.messages is not request.messages
        if is_new and count.tokens > COMPACTED_BEFORE_RATIO * window.tokens:
            request = replace(request, messages=marked(request.messages))
        count_text = self.counter.text_counter(context.target.key, family, asker=context.target.asker, text=count.text)
        # A request made of this one begins otherwise: the server's number for its beginning is no help for that.
        sizes = tuple(math.ceil(size * count.other_ratio) for size in count.sizes)
        fixed_tokens = math.ceil((count.tools_tokens + count.overhead_tokens) * count.other_ratio)
        view = before or View(messages=(), sizes=(), fixed_tokens=0, count_text=count_text, hashes=())
        view = replace(view, messages=request.messages, sizes=sizes, count_text=count_text)
        view = replace(view, fixed_tokens=fixed_tokens, own_tokens=count.tokens)
        budget = Budget(
            rules=context.rules(reasons=family.reasons),
            window_tokens=window.tokens,
            floor=lambda: view.floor_tokens,
            likely_ratio=count.made_likely_ratio,
            own_likely_ratio=count.likely_ratio,
            fixed_tokens=fixed_tokens + sum(sizes[: system_prefix_length(request.messages)]),
        )
        return MeasuredRequest(
            context=context,
            request=request,
            conversation=view,
            count=count,
            budget=budget.with_trigger(context.threshold_tokens),
            window=window,
            family=family,
            is_long=is_long(request.messages),
            started_s=started_s,
        )


async def hashed(measured: MeasuredRequest) -> MeasuredRequest:
    """`measured` with the chains of hashes under which compactions of its conversation are kept."""
    messages, rest = measured.request.messages, measured.conversation.rest
    hashes, words = await off_loop(messages, lambda: (chain(messages), words_chain(rest)))
    return replace(measured, conversation=replace(measured.conversation, hashes=hashes, words_hashes=words))
