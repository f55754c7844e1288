"""The CustomLogger that `config.yaml` names: every hook of LiteLLM that we use, and no logic.

LiteLLM calls the pre-call, iterator and header hooks only when the instance's own class body defines them
(utils.py:2829, 3160: `vars(cls)`), so they all stand here, and this class is never subclassed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from litellm_compaction.concurrency import ended, hold_contexts
from litellm_compaction.config import Settings
from litellm_compaction.engine import Compactor
from litellm_compaction.errors import CompactionError, LiteLLMChanged
from litellm_compaction.events import HarmlessRecords, log_observer
from litellm_compaction.history import History
from litellm_compaction.master_key import stretched
from litellm_compaction.proxy.answer.endings import unread_overflow
from litellm_compaction.proxy.answer.sse import with_heartbeat
from litellm_compaction.proxy.call import Call, Calls
from litellm_compaction.proxy.deployments import note_credential, raw_headers
from litellm_compaction.proxy.intake import Intake
from litellm_compaction.proxy.litellm_inside.application import before_end, key_owner, proxy_secret, wrap_requests
from litellm_compaction.proxy.litellm_inside.connections import proxy_redis
from litellm_compaction.proxy.litellm_inside.router import current_router
from litellm_compaction.proxy.live_settings import LiveSettings
from litellm_compaction.proxy.metrics import Metrics, add_to_trace, note_request_span
from litellm_compaction.proxy.page.turns import Turns
from litellm_compaction.proxy.refusals import (
    Refusal,
    ToldOnce,
    litellm_error_of,
    log_failure,
    log_refused,
    mark_told,
    refusal_of,
    reworded,
    server_gone,
)
from litellm_compaction.proxy.seams import check_classes
from litellm_compaction.proxy.standards.items import Items
from litellm_compaction.proxy.standards.routes import serving
from litellm_compaction.proxy.startup import (
    load_settings,
    provide_api_base,
    provide_master_key,
    spare_collections,
)
from litellm_compaction.proxy.wire import can_be_continued, from_chats_alone, with_details
from litellm_compaction.stores import board_of, open_store, originals_of
from litellm_compaction.tokenizers.sources import Sources
from litellm_compaction.tokens.counter import TokenCounter
from litellm_compaction.windows.lmstudio_rpc import LMStudioRpc
from litellm_compaction.windows.windows import Windows

logger = logging.getLogger("litellm_compaction")
# The calls that every bridged route (chat, messages, responses) becomes at the deployment, and text completions.
_GUARDED_CALLS = frozenset({"acompletion", "atext_completion"})
# Routes that LiteLLM turns into those, whose bodies may say how a client's context is to be treated.
_BRIDGED_CALLS = frozenset({"anthropic_messages", "aresponses"})
# Those and all others that it turns into chats for a server that has nothing else; "" is a kind that it does not name.
_BECOME_CHATS = _BRIDGED_CALLS | {"_aresponses_websocket", "agenerate_content", "agenerate_content_stream", ""}
# In the names of calls without a conversation (litellm/types/utils.py, `CallTypes`).
_ASIDE = (
    *("embedding", "rerank", "moderation", "transcription", "speech", "image", "video", "ocr", "search"),
    *("batch", "file", "fine_tuning"),
)
_harmless = HarmlessRecords()
_ROUTER_WAIT_S = 0.2
_ROUTER_TRIES = 600
# A store or a server that hangs delays the end of the proxy by no more than this.
_END_LIMIT_S = 5.0


def load_handler() -> CompactionHandler:
    """The handler with the settings of the configuration that LiteLLM is loading.

    Raises:
        ConfigError: a setting is unknown or bad; LiteLLM then does not start.
        LiteLLMChanged: it would not call us, or would tell us nothing; it does not start either.
    """
    logger.addFilter(_harmless)
    if not logger.handlers:
        # LiteLLM configures its own loggers only; without this our warnings would have no format and our
        # notices of compactions no place.
        output = logging.StreamHandler()
        output.setFormatter(logging.Formatter("%(asctime)s - %(name)s:%(levelname)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(output)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    check_classes(name for name in vars(CompactionHandler) if name.startswith("async_"))
    hold_contexts()
    provide_master_key()
    provide_api_base()
    settings = load_settings()
    handler = CompactionHandler(settings)
    handler.start()
    handler.show_page()
    before_end(handler.aclose)
    return handler


class CompactionHandler(CustomLogger):  # type: ignore[misc] # LiteLLM is not typed strictly enough to check
    """Guards LM Studio deployments of a stock LiteLLM proxy."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._store = store = open_store(
            settings.store,
            ttl_s=settings.store_ttl_s,
            max_bytes=settings.store_max_bytes,
            redis=proxy_redis,
            secret=proxy_secret,
        )
        self._originals = originals_of(
            store,
            ttl_s=settings.originals_ttl_s,
            max_bytes=settings.originals_max_bytes,
            secret=proxy_secret,
        )
        self._metrics, self._history = Metrics(), History(store)
        self._compactor = Compactor(
            windows=Windows(cache_s=settings.constants.window_cache_s, rpc=LMStudioRpc.of(settings)),
            counter=TokenCounter(),
            sources=Sources(settings.tokenizer),
            store=store,
            board=board_of(store),
            originals=self._originals,
            observers=(log_observer(logger), self._metrics.observe, add_to_trace, self._history),
        )
        has_page = settings.page == "on"
        self._live = LiveSettings(settings, store if has_page else None)
        self._turns = Turns(self._history.add_turn, secret=proxy_secret) if has_page else None
        self._calls = Calls(on_restarts=self._metrics.restarted, turns=self._turns)
        ToldOnce(self._calls.refusal).install()
        self._gate = Intake(self._live, self._compactor, self._calls, store, Items(proxy_secret))
        self._probe: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serves what LiteLLM does not, and looks at every guarded deployment as soon as the router is there."""
        if self._live.is_asleep:
            return
        # At once: a client may ask as soon as the proxy listens.
        wrap_requests(
            lambda application: self._gate.discovery.serving(application, current_router, key_owner),
            lambda application: serving(
                application, lambda name: self._gate.is_guarded(current_router(), name), key_owner
            ),
        )
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._probe = loop.create_task(self._probe_when_ready())

    def show_page(self) -> None:
        """Adds the settings and history page to the proxy, if config.yaml wants it; never raises."""
        if self._turns is None:
            return
        try:
            # Here, so that nothing that the page alone needs can keep the proxy from starting.
            from litellm_compaction.proxy.page.data import Surroundings
            from litellm_compaction.proxy.page.routes import add_page

            add_page(
                Surroundings(
                    live=self._live,
                    guards=self._gate.guards,
                    compactor=self._compactor,
                    store=self._store,
                    router=current_router,
                    lookup=None if self._compactor.recaller is None else self._compactor.recaller.lookup,
                    originals=self._originals,
                )
            )
        except Exception as error:  # noqa: BLE001 - the proxy serves without its page (P8)
            log_failure("page", error)

    async def aclose(self) -> None:
        """Gives back holds that other processes would wait for, and writes down the rest; never raises.

        Work without a request ends: summaries that are written ahead, and looks at servers.
        """
        try:
            await asyncio.wait_for(self._aclose(), _END_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - the proxy ends all the same
            log_failure("end", error)

    async def _aclose(self) -> None:
        await ended([self._probe] if self._probe is not None else [])
        await self._gate.preparing.aclose()
        await self._gate.discovery.aclose()
        await self._gate.seams.aclose()
        await self._history.settle()
        await self._compactor.aclose()

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any] | None:
        """Phase 1 and 2: compacts a chat completion before it is routed, if its window is already certain.

        A text completion that cannot fit is refused here: after routing LiteLLM drops the error's code.
        """
        if self._live.is_asleep:
            return None
        self._calls.serve(data)
        note_request_span(user_api_key_dict)
        note_credential(raw_headers(data))
        if call_type not in _GUARDED_CALLS | _BRIDGED_CALLS:
            return None
        try:
            if call_type in _BRIDGED_CALLS:
                await self._gate.read_orders(current_router(), data, call_type)
            elif call_type == "acompletion":
                await self._gate.before_routing(current_router(), data)
            else:
                await self._gate.refuse_text(current_router(), data)
        except CompactionError as error:
            self._calls.close(data)
            log_refused(str(data.get("model")), error)
            raise refusal_of(error) from error
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            log_failure("pre_call", error)
        return None

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        """Phase 1 and 2 for the chosen deployment: its own window, its own bound on the answer."""
        # LiteLLM names no kind for some calls.
        kind = str(getattr(call_type, "value", call_type) or "")
        if self._live.is_asleep or any(word in kind for word in _ASIDE):
            return None
        own = from_chats_alone(kwargs)
        # Also if nothing else changes, or something fails: LiteLLM could not reach the server.
        unchanged = None if own is kwargs else {**own}
        try:
            await self._gate.check_seams(current_router(), own)
            if kind in _GUARDED_CALLS:
                return await self._gate.before_deployment(current_router(), own) or unchanged
            becomes_chat = kind in _BECOME_CHATS
            return await self._gate.before_bridging(current_router(), own, becomes_chat=becomes_chat) or unchanged
        except CompactionError as error:
            raise self._refused(kwargs, error) from error
        except Exception as error:
            # A request that is not known to be too long goes on as it came (P8).
            call = self._calls.get(kwargs)
            too_long = call.attempts.too_long if call is not None else None
            log_failure("deployment", error, too_long=too_long)
            if too_long is None:
                return unchanged
            raise self._refused(kwargs, too_long) from error

    def _refused(self, kwargs: Mapping[str, Any], error: CompactionError) -> Exception:
        if (call := self._calls.get(kwargs)) is not None:
            call.refused(error)
        told = litellm_error_of(error, kwargs)
        if isinstance(error, LiteLLMChanged):
            # It comes before there is a call.
            log_refused(str(kwargs.get("model")), error)
            mark_told(told)
        return told

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Phase 3 if the hooks carry it, and a heartbeat while a compaction keeps any stream silent."""
        call = self._calls.get(request_data)
        if call is None:
            async for chunk in response:
                yield chunk
            return
        hooked = None
        if call.is_hooked and can_be_continued(request_data):
            hooked = self._gate.hooked_answer(current_router(), call, response, request_data)
        stream = response if hooked is None else hooked.chunks()
        told = self._told(stream, call)
        if call.client.orders.shows:
            told = self._gate.standards.showing(told, call, is_messages=_is_messages(request_data))
        try:
            async for chunk in told:
                yield chunk
        finally:
            await told.aclose()
            if hooked is not None:
                await stream.aclose()
            self._calls.close(request_data)

    async def _told(self, stream: Any, call: Call) -> AsyncGenerator[Any, None]:
        async for chunk in with_heartbeat(stream, call, every_s=self._settings.constants.heartbeat_s):
            yield with_details(chunk, call.attempt.details)

    async def async_post_call_success_hook(self, data: dict[str, Any], user_api_key_dict: Any, response: Any) -> Any:
        """Learns from an answer that was not streamed, and tells if the window has ended it."""
        if (call := self._calls.get(data)) is None:
            return None
        if call.is_hooked and can_be_continued(data):
            self._gate.read_whole(call, response)
        told = with_details(response, call.attempt.details)
        if call.client.orders.shows:
            return await self._gate.standards.shown(told, call, is_messages=_is_messages(data))
        return told if call.attempt.details is not None else None

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, Any],
        original_exception: Exception,
        user_api_key_dict: Any,
        traceback_str: str | None = None,
    ) -> Refusal | None:
        """Learns from an overflow error that came in spite of us, forgets the request, and words the error for clients.

        LiteLLM tells the returned error, but for /v1/messages and inside streams, where it tells the error's `message`.
        """
        call = self._calls.close(request_data)
        if call is None:
            return reworded(self._gate.seams.fault, original_exception, is_guarded=False)
        log = request_data.get("litellm_logging_obj")
        self._learn_overflow(call, str(original_exception), getattr(log, "model_call_details", {}))
        is_guarded, client_text = call.attempt.prepared is not None, call.client.client_text
        told = reworded(call.refusal, original_exception, is_guarded=is_guarded, client_text=client_text)
        if told is not None and call.refusal is not None:
            log_refused(call.client.group, call.refusal)
        if told is not None and hasattr(original_exception, "message"):
            original_exception.message = told.message
            original_exception.status_code = told.status_code  # type: ignore[attr-defined] # LiteLLM's own errors have it
        return told

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Learns from an attempt that failed, before the router retries it."""
        call = self._calls.logged(kwargs)
        if call is not None:
            error = kwargs.get("exception")
            self._learn_overflow(call, str(error or ""), kwargs)
            if call.refusal is None and (gone := server_gone(error, call.attempt.context)) is not None:
                # Before LiteLLM writes its own lines.
                call.refused(gone)
                mark_told(error)

    async def async_post_call_response_headers_hook(
        self,
        data: dict[str, Any],
        user_api_key_dict: Any,
        response: Any,
        request_headers: dict[str, str] | None = None,
        litellm_call_info: dict[str, Any] | None = None,
    ) -> dict[str, str] | None:
        """Tells clients of guarded deployments about the changes to their request.

        LiteLLM asks for headers after the success hook and before a stream's first chunk: the last word on an
        answer that is not streamed.
        """
        call = self._calls.begun(data) if data.get("stream") else self._calls.close(data)
        return call.headers if call is not None else None

    async def _probe_when_ready(self) -> None:
        for _ in range(_ROUTER_TRIES):
            if (router := current_router()) is not None:
                spare_collections()
                self._metrics.show_held(self._compactor.held)
                await self._gate.look_at_seams(router)
                if secret := proxy_secret():
                    # Remembered: the first request would wait for it.
                    await asyncio.to_thread(stretched, secret)
                await self._gate.discovery.start(current_router)
                try:
                    await self._gate.preparing.start(router)
                except Exception as error:  # noqa: BLE001 - fails open (P8)
                    log_failure("probe", error)
                self._gate.preparing.watch(current_router)
                # Vocabularies, templates and listings stay, too.
                spare_collections()
                return
            await asyncio.sleep(_ROUTER_WAIT_S)

    def _learn_overflow(self, call: Call, message: str, details: Mapping[str, object]) -> None:
        try:
            overflow = unread_overflow(call, message, details)
            if call.attempt.context is None:
                return
            if overflow is None:
                self._compactor.windows.invalidate(call.attempt.context.target)
            else:
                self._compactor.replies.learn_overflow(call.attempt.context, call.attempt.prepared, overflow)
        except Exception as error:  # noqa: BLE001 - fails open (P8)
            # The client gets the server's own error, not one of ours.
            log_failure("learn_overflow", error)


def _is_messages(data: Mapping[str, Any]) -> bool:
    """Returns True for a request on Anthropic's route; the only other one with orders is OpenAI's Responses."""
    return "input" not in data
