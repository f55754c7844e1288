"""Every hook of the callback as LiteLLM calls them, without LiteLLM: a fake router, servers that keep what they get.

A `Client` sends one request: before routing, to one deployment after another until one answers, and back. Each of its
steps can be interleaved with those of other clients.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import httpx
from litellm.types.utils import ModelResponse, ModelResponseStream

from litellm_compaction.config import settings_from
from litellm_compaction.proxy import callback
from litellm_compaction.proxy.callback import CompactionHandler
from tests.security.beside.identities import auth_of, metadata_of

Route = Literal["acompletion", "anthropic_messages", "aresponses"]
ROUTES: tuple[Route, ...] = ("acompletion", "anthropic_messages", "aresponses")
# A public address is nobody's LM Studio, so that nobody is asked for a window.
BASE = "https://upstream.example/v1"
WINDOW = 1200
# What LiteLLM sends as it came.
_AS_THEY_CAME = (
    *("n_predict", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "suffix", "odd"),
    *("tools", "functions", "response_format", "grammar", "prediction", "logit_bias", "echo"),
)
# What the client that the running task serves has sent by the transport.
_sent: ContextVar[list[dict[str, Any]]] = ContextVar("sent")
_DEPLOYMENTS = {"carried": "openai/test", "hooked": "deepseek/test", "foreign": "deepseek/foreign"}


class Logging:
    """LiteLLM's logging object: one for each request, the same in every hook."""

    def __init__(self, call_id: str) -> None:
        self.litellm_call_id = call_id
        self.model_call_details: dict[str, Any] = {"litellm_call_id": call_id}


class Router:
    """LiteLLM's router: three groups of one deployment each; its own calls are answered with what they were asked."""

    enable_pre_call_checks = True

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.entries = {group: _entry(group, model) for group, model in _DEPLOYMENTS.items()}
        self.fallbacks: list[Any] = []

    @property
    def model_list(self) -> list[dict[str, Any]]:
        return list(self.entries.values())

    def get_model_list(self, model_name: str | None = None, team_id: str | None = None) -> list[dict[str, Any]]:
        return [entry for entry in self.model_list if model_name in (None, entry["model_name"])]

    def get_deployment(self, model_id: str) -> Any:
        entry = next((entry for entry in self.model_list if entry["model_info"]["id"] == model_id), None)
        if entry is None:
            return None
        return SimpleNamespace(litellm_params=SimpleNamespace(**entry["litellm_params"]), model_dump=lambda: entry)

    def get_model_group_info(self, group: str) -> None:
        return None

    async def acompletion(self, **arguments: Any) -> Any:
        """A summary or continuation that quotes what it was made from, so that it shows whose conversation that was."""
        self.asked.append(arguments)
        await asyncio.sleep(0)
        said = f"### Current state\n{' '.join(sorted(words_of(arguments['messages'])))} is what it is about."
        return streamed(said) if arguments.get("stream") else whole_answer(said)


def _entry(group: str, model: str) -> dict[str, Any]:
    compaction: dict[str, Any] = {"enabled": True, "context_length": WINDOW} if group != "foreign" else {}
    params = {"model": model, "api_key": "k", **({"api_base": BASE} if group == "carried" else {})}
    return {
        "model_name": group,
        "litellm_params": params,
        "model_info": {"id": f"id-{group}", "compaction": compaction},
    }


def words_of(value: object) -> set[str]:
    """The words that tell whose text it is: CANARY-…"""
    return set(re.findall(r"CANARY-[a-z0-9-]+", json.dumps(value, default=str)))


def whole_answer(text: str, reason: str = "stop") -> ModelResponse:
    """LiteLLM's response object; without usage, which would teach."""
    return ModelResponse(
        choices=[{"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}],
    )


async def streamed(text: str, reason: str = "stop") -> AsyncIterator[ModelResponseStream]:
    """LiteLLM's stream."""
    for delta, ended in (({"role": "assistant", "content": text}, None), ({}, reason)):
        await asyncio.sleep(0)
        yield ModelResponseStream(choices=[{"index": 0, "delta": delta, "finish_reason": ended}])


@dataclass
class Server(httpx.AsyncBaseTransport):
    """The inner transport: every body that leaves, answered with the words that it had."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    answer: Callable[[dict[str, Any]], httpx.Response] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self.bodies.append(body)
        _sent.get([]).append(body)
        await asyncio.sleep(0)
        if self.answer is not None:
            return self.answer(body)
        text = f"Seen: {' '.join(sorted(words_of(body)))}"
        message = {"role": "assistant", "content": text}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return httpx.Response(200, json={"id": "1", "choices": [choice]})
        chunks = [
            {"id": "1", "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            {"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        ]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=text)


@dataclass
class Scene:
    """A handler, its router, the server behind its transport, and what left by the hooks."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    router: Router = field(default_factory=Router)
    server: Server = field(default_factory=Server)

    def __post_init__(self) -> None:
        chosen = settings_from({"store": "memory://", "page": "off", "notices": "off", **self.settings})
        self.handler = CompactionHandler(chosen)
        self.handler._gate._inner = self.server
        self.calls = self.handler._calls


@dataclass
class Client:
    """One request of one identity.

    Attributes:
        key: who asks.
        call_id: what its header `x-litellm-call-id` says.
        shown: its other headers.
        attempts: the groups that are tried in turn; all but the last fail.
        sent: what left for a server, by either carrier.
        providers: by which way.
        is_cut: whether its server ends the answer at the window, so that it has to be carried on.
        refusal: what its server says in place of an answer, made from the body that it got.
        read: the answer's text.
        pause: is awaited between any two steps.
    """

    scene: Scene
    key: str
    messages: Sequence[Mapping[str, Any]]
    call_id: str = "shared"
    shown: Mapping[str, str] = field(default_factory=dict)
    attempts: Sequence[str] = ("carried",)
    route: Route = "acompletion"
    stream: bool = False
    is_cut: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    refusal: Callable[[Any], str] | None = None
    pause: Callable[[], Awaitable[None]] = field(default=lambda: asyncio.sleep(0))
    sent: list[dict[str, Any]] = field(default_factory=list)
    providers: list[Any] = field(default_factory=list)
    read: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.auth = auth_of(self.key)

    async def send(self) -> None:
        """The whole request, through all hooks."""
        log = Logging(self.call_id)
        metadata = metadata_of(self.key)
        place = "metadata" if self.route == "acompletion" else "litellm_metadata"
        shown = "messages" if self.route != "aresponses" else "input"
        data: dict[str, Any] = {
            "model": self.attempts[0],
            shown: list(self.messages),
            "stream": self.stream,
            **self.body,
            "litellm_call_id": self.call_id,
            "litellm_logging_obj": log,
            "secret_fields": {"raw_headers": {"authorization": f"Bearer {self.key}", **self.shown}},
            "proxy_server_request": {"headers": dict(self.shown), "body": {**self.body}},
            place: metadata,
        }
        handler = self.scene.handler
        await self.pause()
        try:
            await handler.async_pre_call_hook(self.auth, None, data, self.route)
            for group in self.attempts:
                await self.pause()
                await self._attempt(group, data, log, place, fails=group != self.attempts[-1])
        except Exception as error:  # noqa: BLE001 - whatever a client would be told
            self.error = error
            del data["litellm_logging_obj"]
            await handler.async_post_call_failure_hook(data, error, self.auth)

    async def _attempt(self, group: str, data: dict[str, Any], log: Logging, place: str, *, fails: bool) -> None:
        handler, entry = self.scene.handler, self.scene.router.entries[group]
        given = {key: value for key, value in data.items() if key not in ("model", "input")}
        kwargs: dict[str, Any] = {
            **entry["litellm_params"],
            **given,
            "messages": data.get("messages", data.get("input")),
            "model_info": entry["model_info"],
            place: {**data[place], "model_group": data["model"]},
        }
        if self.route != "acompletion":
            kwargs = await handler.async_pre_call_deployment_hook(kwargs, self.route) or kwargs
            await self.pause()
        changed = await handler.async_pre_call_deployment_hook(kwargs, "acompletion") or kwargs
        self.providers.append(changed.get("custom_llm_provider"))
        await self.pause()
        if changed.get("client") is None and self.refusal is not None:
            raise RuntimeError(await self._logged(log, self.refusal(changed)))
        if fails:
            self.sent.append({"messages": changed["messages"]})
            await self._logged(log, "refused")
            return
        if changed.get("client") is not None:
            await self._carried(changed, data)
        else:
            await self._hooked(changed, data)

    async def _logged(self, log: Logging, failure: str) -> str:
        log.model_call_details["exception"] = failure
        await self.scene.handler.async_log_failure_event(log.model_call_details, None, None, None)
        return failure

    async def _carried(self, changed: dict[str, Any], data: dict[str, Any]) -> None:
        body = {
            "model": "test",
            "messages": changed["messages"],
            "stream": self.stream,
            **{key: changed[key] for key in _AS_THEY_CAME if key in changed},
            **changed.get("extra_body", {}),
        }
        transport = changed["client"].transport
        request = httpx.Request("POST", f"{BASE}/chat/completions", content=json.dumps(body).encode())
        _sent.set(self.sent)
        if (refusal := self.refusal) is not None:
            self.scene.server.answer = lambda body: httpx.Response(400, json={"error": {"message": refusal(body)}})
        response = await transport.handle_async_request(request)
        self.read = (await response.aread()).decode()
        self.scene.server.answer = None
        await self._back(data, None)

    async def _hooked(self, changed: dict[str, Any], data: dict[str, Any]) -> None:
        self.sent.append(
            {
                key: changed[key]
                for key in ("messages", "max_tokens", "stream_options", *_AS_THEY_CAME)
                if key in changed
            }
            | changed.get("extra_body", {})
        )
        said = f"Seen: {' '.join(sorted(words_of(changed['messages'])))}"
        await self._back(data, whole_answer(said, "length" if self.is_cut else "stop"))

    async def _back(self, data: dict[str, Any], answer: ModelResponse | None) -> None:
        handler, auth = self.scene.handler, self.auth
        await self.pause()
        if self.stream:
            self.headers = await self._headers(data)
            await self.pause()
            async for chunk in handler.async_post_call_streaming_iterator_hook(auth, self._chunks(answer), data):
                self.read += str(chunk)
                await self.pause()
            return
        if answer is not None:
            replaced = await handler.async_post_call_success_hook(data, auth, answer)
            self.read += str((replaced or answer).choices[0].message.content)
            await self.pause()
        self.headers = await self._headers(data)

    async def _headers(self, data: dict[str, Any]) -> Mapping[str, str]:
        return await self.scene.handler.async_post_call_response_headers_hook(data, self.auth, None) or {}

    async def _chunks(self, answer: ModelResponse | None) -> AsyncIterator[ModelResponseStream]:
        if answer is None:
            return
        async for chunk in streamed(answer.choices[0].message.content, answer.choices[0].finish_reason):
            await self.pause()
            yield chunk


def pauses(chance: random.Random, most: int = 4) -> Callable[[], Awaitable[None]]:
    """Lets others go first, now for longer, now for less long."""

    async def pause() -> None:
        for _ in range(chance.randrange(most)):
            await asyncio.sleep(0)

    return pause


class RandomOrder(asyncio.SelectorEventLoop):
    """An event loop that lets tasks go on in any order: of those that are ready, at each suspension, the product's too.

    Callbacks that are no steps of tasks keep their places: asyncio promises the order of those.

    Attributes:
        chance: decides; the same seed gives the same order.
        choices: how often there was more than one order.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance
        self.choices = 0

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        places = [place for place, handle in enumerate(ready) if _is_step(handle)]
        if len(places) > 1:
            self.choices += 1
            for place, handle in zip(
                places, self.chance.sample([ready[each] for each in places], len(places)), strict=True
            ):
                ready[place] = handle
        super()._run_once()  # type: ignore[misc]


def _is_step(handle: Any) -> bool:
    """Whether a handle is a task's, in C (3.10 to 3.13) or in Python."""
    run = handle._callback
    return type(run).__name__.startswith("Task") or isinstance(getattr(run, "__self__", None), asyncio.Task)


def conversation(canary: str, rounds: int) -> list[dict[str, Any]]:
    """A conversation whose every message says whose it is; 4 rounds are over the trigger of 1,200 tokens."""
    messages = [{"role": "system", "content": f"You serve CANARY-{canary}."}]
    for number in range(rounds):
        messages.append({"role": "user", "content": f"Question {number} of CANARY-{canary} about the parser. " * 6})
        messages.append({"role": "assistant", "content": f"Answer {number} for CANARY-{canary}: it is ported. " * 6})
    return [*messages, {"role": "user", "content": f"And now, CANARY-{canary} ?"}]


def use_router(monkeypatch: Any, router: Router) -> None:
    """Makes a router the proxy's."""
    monkeypatch.setattr(callback, "_router", lambda: router)
