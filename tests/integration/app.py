"""LiteLLM's own application with a config.yaml, and simulators behind it, in this process.

It is the application that `litellm --config` serves, with its lifespan; only uvicorn and the sockets are not there.
`proxy` and `serve` stand for those of `harness` and of the simulator: a test can be moved from one to the other.

LiteLLM keeps one configuration in its modules, so one application is open at a time. A request to another opens that
again, with the data of its folder; what it had in memory is lost, as by a restart.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import gc
import importlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx

from tests.constants import beside
from tests.integration.harness import BROWSER, MASTER_KEY, Proxy
from tests.integration.network import Network
from tests.lmstudio_double import Address, Simulator
from tests.lmstudio_double.rendering import load_vocabulary
from tests.lmstudio_double.server import Application

T = TypeVar("T")
_LOGGERS = ("litellm_compaction", "LiteLLM", "LiteLLM Proxy", "LiteLLM Router")
_SHUTDOWN = "litellm.proxy.shutdown.graceful_shutdown_manager"
# Bounds a hang; on a busy machine a table of requests takes minutes.
_LIMIT_S = 900
# In bytes, of a message of a WebSocket.
_LONGEST = 10_000_000


class _Loop:
    """The event loop of all applications and servers, in a thread of its own, to the end of the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="in-process", daemon=True)
        self._thread.start()
        atexit.register(self._close)

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs there."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(job, self._loop)
        try:
            return future.result(_LIMIT_S)
        except BaseException:
            future.cancel()
            raise

    def _close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


@cache
def _loop() -> _Loop:
    return _Loop()


def in_loop(job: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine in the event loop of all applications."""
    return _loop().run(job)


NETWORK = Network()
_OPEN: list[_Application] = []
_BY_NETLOC: dict[str, _Application] = {}
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def attached(server: Callable[..., Awaitable[None]]) -> Iterator[str]:
    """The address of a server of this process until the block ends."""
    url = NETWORK.address()
    NETWORK.attach(url, server)
    try:
        yield url
    finally:
        NETWORK.detach(url)


@contextmanager
def serve(simulator: Simulator) -> Iterator[Address]:
    """Serves a simulator at an address of this process until the block ends."""
    load_vocabulary()
    served = Application(simulator, NETWORK.cut)

    async def end() -> None:
        served.stopping.set()
        simulator.forget_connections()

    try:
        with attached(served) as url:
            yield Address(host="127.0.0.1", port=int(url.rpartition(":")[2]))
    finally:
        in_loop(end())


@contextmanager
def proxy(config: Path, **environ: str) -> Iterator[Proxy]:
    """LiteLLM's application with a configuration while the block lasts; as `harness.proxy`."""
    let_clients_in()
    application = _Application(config, environ)
    netloc = urlsplit(application.proxy.base_url).netloc
    _BY_NETLOC[netloc] = application
    with _ONE_AT_A_TIME:
        application.activate()
    try:
        yield application.proxy
    finally:
        with _ONE_AT_A_TIME:
            application.close()
        del _BY_NETLOC[netloc]
        application.proxy.client.close()
    assert [line for line in application.proxy.lines if "failed_open" in line and "sabotage" not in line] == []


def activate(running: Proxy) -> None:
    """Opens an application whose network is used directly, if another one is open."""
    _BY_NETLOC[urlsplit(running.base_url).netloc].activate()


@contextmanager
def socket(running: Proxy, path: str, key: str) -> Iterator[Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """A WebSocket to an application, as a function: of a request to the last event of its answer."""
    activate(running)
    opened = _loop().run(
        NETWORK.socket(f"{running.base_url}{path}", [(b"authorization", f"Bearer {key}".encode())], _LONGEST)
    )

    async def last(asked: Mapping[str, Any]) -> Any:
        await opened.send_json(asked)
        while (event := await opened.receive_json())["type"] not in ("response.completed", "error"):
            pass
        return event

    try:
        yield lambda asked: _loop().run(last(asked))
    finally:
        _loop().run(opened.close())


class _Application:
    """One configuration, open or not."""

    def __init__(self, config: Path, environ: Mapping[str, str]) -> None:
        self._config = config
        self._environ = environ
        self._stack = ExitStack()
        self._url = NETWORK.address()
        self.proxy = Proxy(
            base_url=self._url,
            process=None,
            client=httpx.Client(base_url=self._url, headers={"user-agent": BROWSER}, timeout=300, transport=_Bridge()),
        )

    def activate(self) -> None:
        """Opens it, and closes the one that is open."""
        if [self] == _OPEN:
            return
        for other in _OPEN:
            other.close()
        with _without_garbage(), ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        _OPEN.append(self)

    def close(self) -> None:
        """Ends it as the end of a proxy does."""
        if self in _OPEN:
            _OPEN.remove(self)
            with _without_garbage():
                self._stack.close()

    def _open(self, stack: ExitStack) -> None:
        folder = str(self._config.parent)
        variables = {
            "LITELLM_MASTER_KEY": MASTER_KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "XDG_DATA_HOME": folder,
            "CONFIG_FILE_PATH": str(self._config),
            "WORKER_CONFIG": str(self._config),
            **self._environ,
        }
        stack.enter_context(patch.dict(os.environ, variables))
        os.environ.pop("LITELLM_COMPACTION_HOME", None)
        stack.enter_context(beside(self._config.parent))
        stack.enter_context(_put_back())
        stack.enter_context(_logging_to(self.proxy))
        server = _server()
        lifespan = server.proxy_startup_event(server.app)
        before: set[asyncio.Task[Any]] = set()

        async def begin() -> None:
            before.update(asyncio.all_tasks())
            await lifespan.__aenter__()
            NETWORK.attach(self._url, server.app)

        async def end() -> None:
            NETWORK.detach(self._url)
            try:
                await lifespan.__aexit__(None, None, None)
                await importlib.import_module("litellm").close_litellm_async_clients()
            finally:
                left = asyncio.all_tasks() - before - {asyncio.current_task()}
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

        _loop().run(begin())
        stack.callback(lambda: _loop().run(end()))


class _Bridge(httpx.BaseTransport):
    """Carries a test's requests into the loop; the body of an answer is read there as it is read here."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer: httpx.Response = _bridged(request)
        return answer


def _bridged(request: Any, kind: Any = httpx) -> Any:
    with _ONE_AT_A_TIME:
        if application := _BY_NETLOC.get(request.url.netloc.decode()):
            application.activate()
    request.read()
    there = httpx.Request(request.method, str(request.url), headers=request.headers.raw, content=request.content)
    response = _loop().run(NETWORK.request(there))
    stream = type("Pulled", (_Pulled, kind.SyncByteStream), {})(response)
    return kind.Response(response.status_code, headers=response.headers.raw, stream=stream)


@cache
def _server() -> Any:
    server = importlib.import_module("litellm.proxy.proxy_server")
    # What is imported is no garbage: it is not looked at each time that an application ends.
    gc.freeze()
    return server


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Collects what LiteLLM leaves unclosed, such as clients and coroutines: no later test is told of it."""
    with warnings.catch_warnings():
        for kind in (ResourceWarning, RuntimeWarning):
            warnings.simplefilter("ignore", kind)
        yield
        gc.collect()


@cache
def let_clients_in() -> None:
    """Lets the clients of LiteLLM and of a test's own thread, such as OpenAI's, reach what is in the network.

    To the end of the process: an address that is in the network is nowhere else.
    """
    stack = ExitStack()
    atexit.register(stack.close)
    stack.enter_context(NETWORK.in_use())
    for kind in (httpx, importlib.import_module("httpx2")):
        by_socket = kind.HTTPTransport.handle_request

        def handled(transport: Any, request: Any, kind: Any = kind, by_socket: Any = by_socket) -> Any:
            is_here = NETWORK.has(request.url.netloc.decode())
            return _bridged(request, kind) if is_here else by_socket(transport, request)

        stack.enter_context(patch.object(kind.HTTPTransport, "handle_request", handled))


class _Pulled:
    def __init__(self, response: httpx.Response) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._stream = response.stream
        self._pieces = response.stream.__aiter__()

    def __iter__(self) -> Iterator[bytes]:
        while (piece := _loop().run(self._next())) is not None:
            yield piece

    def close(self) -> None:
        _loop().run(self._stream.aclose())

    async def _next(self) -> bytes | None:
        return await anext(self._pieces, None)


class _Lines(logging.Handler):
    """Hands each line of the log to the proxy that a test looks at."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__()
        self._proxy = proxy
        self.setFormatter(logging.Formatter("%(asctime)s - %(name)s:%(levelname)s: %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == threading.main_thread().ident:
            # Of a test that runs while the application is open.
            return
        with self._proxy.said:
            self._proxy.lines += self.format(record).splitlines()
            self._proxy.said.notify_all()


@contextmanager
def _logging_to(proxy: Proxy) -> Iterator[None]:
    lines = _Lines(proxy)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    ours, *_ = loggers
    before = ours.level, ours.propagate, list(ours.handlers), list(ours.filters)
    # As the handler does where a proxy has given it no logger.
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for logger in loggers:
        logger.addHandler(lines)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(lines)
        level, ours.propagate, ours.handlers[:], ours.filters[:] = before
        ours.setLevel(level)


@contextmanager
def _put_back() -> Iterator[None]:
    """Gives LiteLLM's modules, its application and our package their values back.

    LiteLLM adds routes when they are first asked for, which it remembers elsewhere: these stay.
    """
    litellm = importlib.import_module("litellm")
    server = importlib.import_module("litellm.proxy.proxy_server")
    package = importlib.import_module("litellm_compaction")
    modules = [_Values(module) for module in (litellm, server)]
    functions = {module: _functions(module) for module in _modules("litellm.")}
    # Over aiohttp a request would not pass httpx's transport, where the network is.
    litellm.disable_aiohttp_transport = True
    router, stack = server.app.router, server.app.router.middleware_stack
    try:
        yield
    finally:
        for module in modules:
            module.put_back()
        for changed, before in functions.items():
            vars(changed).update(
                {name: value for name, value in before.items() if vars(changed).get(name) is not value}
            )
        router.routes[:] = [route for route in router.routes if not _is_ours(route)]
        router.middleware_stack = stack
        vars(package).pop("handler", None)
        # A LiteLLM that knows of its own end must not take the next application for the one that has ended.
        with suppress(ImportError):
            importlib.import_module(_SHUTDOWN).GracefulShutdownManager.reset()
        litellm.in_memory_llm_clients_cache.flush_cache()


def _modules(prefix: str) -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.startswith(prefix) and module is not None]


def _functions(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, FunctionType)}


def _is_ours(route: Any) -> bool:
    called = getattr(route, "endpoint", None) or getattr(route, "app", None)
    return str(getattr(called, "__module__", type(called).__module__)).startswith("litellm_compaction")


class _Values:
    """The values of a module, and what is in its lists, sets and dictionaries."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._names = dict(vars(module))
        kinds = (list, dict, set)
        self._inside = {name: copy.copy(value) for name, value in self._names.items() if type(value) in kinds}

    def put_back(self) -> None:
        names = vars(self._module)
        for name in set(names) - set(self._names):
            if not isinstance(names[name], ModuleType):
                del names[name]
        names.update(self._names)
        for name, before in self._inside.items():
            value = self._names[name]
            if value is not None and value != before:
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)
