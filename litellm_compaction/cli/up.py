"""`litellm-compaction up`: a stock proxy with the plug-in, in front of LM Studio or of the simulator.

`demo` starts its proxy by the functions below: watched until it answers, ended by its own handle.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, NamedTuple

import httpx

from litellm_compaction.cli.config_file import ConfigFile, read_config, shipped_config
from litellm_compaction.cli.doctor import problems_at_servers
from litellm_compaction.cli.running import Running, told
from litellm_compaction.cli.servers import LISTING_LIMIT_S, listing_of
from litellm_compaction.cli.shells import IS_WINDOWS, content_of, quoted, variable
from litellm_compaction.config import settings_from
from litellm_compaction.errors import CompactionError, ConfigError, ServerUnavailable
from litellm_compaction.master_key import KEY_VARIABLE, ensure_master_key
from litellm_compaction.proxy.config_check import API_BASE_VARIABLE, CALLBACKS_PLACE, ENVIRONMENT_PREFIX, Finding
from litellm_compaction.proxy.routing import as_entry
from litellm_compaction.windows.fetch import KeyRefused, without_userinfo
from litellm_compaction.windows.lmstudio import DEFAULT_ADDRESS, Listing, server_root

if TYPE_CHECKING:
    from litellm_compaction.simulator import Simulator
    from litellm_compaction.simulator.script import Script

# No model of LM Studio's has such a name, so nobody takes its answers for a real model's.
SIMULATED_MODEL = "simulated-qwen3-8b"
_SIMULATED_TOKENS = 8192
_MOST_NAMED = 3
# As the plug-in writes them (`proxy/callback.py`).
_OWN_LINE = re.compile("litellm_compaction:(?:WARNING|ERROR|CRITICAL|INFO: guarding)")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# LiteLLM's imports take 6–8 s on two cores (measured 2026-11), several times that on a cold or busy disk.
PROXY_START_LIMIT_S = 180.0
_POLL_S = 0.2
# Between two questions to an LM Studio that is waited for.
RETRY_S = 1.0
_GRACE_S = 10.0
_RUN_LITELLM = "import sys; from litellm import run_server; sys.argv[0] = 'litellm'; sys.exit(run_server())"


class _Upstream(NamedTuple):
    # None if the config says it.
    api_base: str | None
    # One to try, "" if none is known.
    model: str
    is_simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    # For the proxy's environment; None if the config has its own.
    value: str | None = field(default=None, repr=False)
    # For the user.
    text: str = field(repr=False)
    # How a shell reads it: a Unix one, or PowerShell.
    in_shell: str


def up(
    *,
    host: str,
    port: int,
    config: Path | None,
    simulator: bool,
    lm_studio: str | None,
    force: bool,
    verbose: bool,
    environ: Mapping[str, str],
) -> int:
    """Runs until the proxy ends or is told to end; the proxy's exit code, 1 for a file with a problem.

    Args:
        port: 0 takes a free one.
        config: None is the shipped one.
        simulator: use the simulator, even if LM Studio answers.
        lm_studio: the address that must answer; None waits for that in `LM_STUDIO_API_BASE`, else looks at port 1234.
        force: start in spite of a problem: a proxy without the handler, say, starts and guards nothing.
        verbose: show what LiteLLM says while it starts; else only if it does not.

    Raises:
        CompactionError: something is missing or wrong; nothing is left running.
    """
    path = config or shipped_config()
    file = read_config(path)
    settings = settings_from(file.settings)
    problems = [finding for finding in file.findings(environ) if finding.level == "problem"]
    if _are_told(problems) and not force:
        return 1
    port = usable_port(host, port)
    command = proxy_command(path, host, port)
    stopping = _Stopping()
    with signals_to(stopping.on_signal, *_SIGNALS), _upstream(file, simulator, lm_studio, environ) as upstream:
        reached = environ if upstream.api_base is None else {**environ, API_BASE_VARIABLE: upstream.api_base}
        if _are_told(problems_at_servers(file, reached)) and not force:
            return 1
        # Made last, so that a key that is shown only once is never made by a start that fails before.
        key = _key(file, environ)
        _say(key.text)
        base_url = local_url(host, port)
        _say(f"Starting LiteLLM's proxy with {path} …")
        environment = proxy_environment(environ, master_key=key.value, api_base=upstream.api_base)
        output = None if verbose else subprocess.PIPE
        with (
            running("proxy", command, environment, output=output) as proxy,
            _folded(proxy) as said,
            told(Running(base_url, str(file.path), upstream.api_base, upstream.is_simulated), environ),
        ):
            stopping.proxy = proxy
            try:
                wait_until_alive(proxy, base_url)
            except ServerUnavailable as error:
                code = exit_code(proxy, 0 if not stopping.asked else None)
                if not stopping.asked:
                    said.unfold()
                    _say(f"litellm-compaction: {error}", to_errors=True)
                return code or (0 if stopping.asked else 1)
            said.go_on()
            _say(f"\nReady at {base_url}/v1 (the base URL for clients), Ctrl-C ends it.")
            if upstream.is_simulated:
                _say("It serves a SIMULATOR, not LM Studio: answers are canned.")
            if settings.page == "on" and not any(finding.place == CALLBACKS_PLACE for finding in problems):
                _say(f"Settings and history: {base_url}/compaction, opened with the master key.")
            _say(f"Try:\n\n{_request(base_url, _asked(file, upstream.model), key.in_shell, powershell=IS_WINDOWS)}\n")
            return exit_code(proxy) or 0


def _are_told(problems: Sequence[Finding]) -> bool:
    """Shows the problems; True if one of them stays until somebody does something."""
    for finding in problems:
        _say(f"litellm-compaction: {finding.place}: {finding.message}", to_errors=True)
    stays = any(not finding.passes for finding in problems)
    if stays:
        _say("--force starts the proxy all the same.", to_errors=True)
    return stays


class _Folded:
    """Holds what a proxy says until it is ready, then passes it on as it comes.

    Of what was held only the plug-in's own warnings are shown, and what it guards: LiteLLM's start is 40 lines about
    other things.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._held: list[str] = []
        self._is_held = True
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def go_on(self) -> None:
        self._end(lambda line: _OWN_LINE.search(line) is not None)

    def unfold(self) -> None:
        """Shows all of it, to its end: the proxy has failed."""
        self._end(lambda _: True)
        self.wait()

    def wait(self) -> None:
        """Returns when the last of it is shown, soon after the proxy has ended."""
        self._reader.join(_GRACE_S)

    def _end(self, is_shown: Callable[[str], bool]) -> None:
        with self._lock:
            self._is_held = False
            for line in filter(is_shown, self._held):
                _say(line)

    def _read(self) -> None:
        for raw in self._stream:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            with self._lock:
                if self._is_held:
                    self._held.append(line)
                    continue
                # A proxy whose lines nobody reads would stop at the next one.
                with contextlib.suppress(OSError):
                    _say(line)


class _Shown:
    """The same for a proxy that writes to the terminal itself."""

    def go_on(self) -> None: ...

    def unfold(self) -> None: ...


@contextlib.contextmanager
def _folded(proxy: subprocess.Popen[bytes]) -> Iterator[_Folded | _Shown]:
    if proxy.stdout is None:
        yield _Shown()
        return
    said = _Folded(proxy.stdout)
    try:
        yield said
    finally:
        if proxy.poll() is not None:
            said.wait()


@contextlib.contextmanager
def _upstream(
    file: ConfigFile, simulator: bool, lm_studio: str | None, environ: Mapping[str, str]
) -> Iterator[_Upstream]:
    models = file.models_by_environment
    if not models:
        if simulator or lm_studio is not None:
            raise ConfigError(
                f"{file.path} names its servers itself, so --simulator and --lm-studio would have no effect. "
                "Write `api_base: os.environ/LM_STUDIO_API_BASE` there, or leave the option out."
            )
        _say(f"Servers: those that {file.path} names.")
        yield _Upstream(None, "")
        return
    real = next((model for model in models if "*" not in model and model != SIMULATED_MODEL), None)
    if simulator and real is not None:
        raise ConfigError(
            f"The simulator has {SIMULATED_MODEL} only, and {file.path} names {real}. Leave --simulator out: "
            "then LM Studio is waited for."
        )
    url = lm_studio or environ.get(API_BASE_VARIABLE) or DEFAULT_ADDRESS
    url = url if "://" in url else f"http://{url}"
    root = server_root(url)
    listing = None if simulator else _listing(url, environ)
    why = f"{API_BASE_VARIABLE} is set" if environ.get(API_BASE_VARIABLE) else real and f"{file.path} names {real}"
    if listing is None and why and lm_studio is None and not simulator:
        _say(
            f"Waiting for LM Studio at {without_userinfo(root)}, because {why}: start its server "
            "(`lms server start`). Ctrl-C ends this."
        )
        while listing is None:
            time.sleep(RETRY_S)
            listing = _listing(url, environ)
    if listing is not None:
        model, text = _loaded(listing)
        _say(f"LM Studio: {without_userinfo(root)} (API {listing.api}), {text}.")
        yield _Upstream(f"{root}/v1", model)
        return
    if lm_studio is not None:
        raise ServerUnavailable(
            f"No LM Studio answers at {without_userinfo(root)} ({LISTING_LIMIT_S} s limit). Start its server "
            "(`lms server start`), or use --simulator."
        )
    reason = "as asked" if simulator else f"because no LM Studio answers at {root}"
    from litellm_compaction.simulator import serve

    with serve(simulated(_SIMULATED_TOKENS)) as address:
        _say(
            f"SIMULATOR, not LM Studio, {reason}: {address.base_url}, {SIMULATED_MODEL} loaded "
            f"with {_SIMULATED_TOKENS:,} tokens. Its answers are canned."
        )
        yield _Upstream(f"{address.base_url}/v1", SIMULATED_MODEL, is_simulated=True)


def _listing(url: str, environ: Mapping[str, str]) -> Listing | None:
    try:
        return listing_of(url, environ.get("LM_STUDIO_API_KEY"))
    except KeyRefused as error:
        raise ServerUnavailable(
            f"{error}. Set LM_STUDIO_API_KEY to a token of that server, or use --simulator."
        ) from error


def simulated(context_tokens: int, *, script: Script | None = None, chunk_tokens: int = 1) -> Simulator:
    """Returns a simulator with `SIMULATED_MODEL` loaded, which counts by the vocabulary of the model's family."""
    from litellm_compaction.simulator import Model, Simulator, count_by
    from litellm_compaction.tokenizers.families import family_of
    from litellm_compaction.tokenizers.registry import vocabulary

    count_by(lambda: vocabulary(family_of("", SIMULATED_MODEL).vocabulary).encoding)
    simulator = Simulator([Model(SIMULATED_MODEL)], script=script, chunk_tokens=chunk_tokens, takes_any_name=False)
    simulator.load(SIMULATED_MODEL, context_tokens)
    return simulator


def _loaded(listing: Listing) -> tuple[str, str]:
    """A model to try, and the loaded ones in words."""
    chat = [model for model in listing.models if model.kind == "llm"]
    loaded = [(model.key, copy.context_length) for model in chat for copy in model.instances]
    if loaded:
        named = [f"{key} with {f'{tokens:,}' if tokens else 'unknown'} tokens" for key, tokens in loaded]
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        return loaded[0][0], f"loaded: {', '.join(named[:_MOST_NAMED])}{more}"
    if chat:
        return chat[0].key, "no model loaded yet (the first request loads one)"
    return "", "no chat model downloaded"


def _key(file: ConfigFile, environ: Mapping[str, str]) -> _Key:
    written = file.section("general_settings").get("master_key")
    name = written.removeprefix(ENVIRONMENT_PREFIX) if isinstance(written, str) else KEY_VARIABLE
    if name == written:
        return _Key(text=f"Master key: the one in {file.path}.", in_shell="YOUR-MASTER-KEY")
    if name != KEY_VARIABLE:
        return _Key(text=f"Master key: from {name}.", in_shell=variable(name, powershell=IS_WINDOWS))
    key = ensure_master_key(dict(environ))
    if key.path is None:
        return _Key(
            value=key.key,
            text=f"Master key: from {KEY_VARIABLE}.",
            in_shell=variable(KEY_VARIABLE, powershell=IS_WINDOWS),
        )
    text = f"Master key: in {key.path}."
    if key.created:
        text = f"Master key (new, shown this once): {key.key}\n  kept in {key.path}, readable only by you."
    return _Key(value=key.key, text=text, in_shell=content_of(str(key.path), powershell=IS_WINDOWS))


def _asked(file: ConfigFile, model: str) -> str:
    """A `model_name` of the config to try: the wildcard's of a model that the server has loaded, else the first one."""
    entries = [entry for entry in file.deployments if as_entry(entry.get("model_info")).get("mode") != "embedding"]
    names = [str(entry.get("model_name")) for entry in entries]
    wildcard = next((name for name in names if "*" in name), None)
    plain = next((name for name in names if "*" not in name), None)
    if plain is not None and not (model and wildcard):
        return plain
    return (wildcard or "lm_studio/*").replace("*", model or "MODEL")


def _request(base_url: str, model: str, in_shell: str, *, powershell: bool) -> str:
    """A request to paste: for PowerShell, whose `curl` is another program, or for a Unix shell."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    if powershell:
        return (
            f"Invoke-RestMethod {base_url}/v1/chat/completions -Method Post -ContentType application/json `\n"
            f'  -Headers @{{Authorization = "Bearer {in_shell}"}} `\n'
            f"  -Body {quoted(body, powershell=True)}"
        )
    return (
        f"curl {base_url}/v1/chat/completions \\\n"
        f'  -H "Authorization: Bearer {in_shell}" \\\n'
        f'  -H "Content-Type: application/json" \\\n'
        f"  -d '{body}'"
    )


class _Stopping:
    """Stop signals are passed on to the proxy once it runs; before that they raise."""

    asked = False
    proxy: subprocess.Popen[bytes] | None = None

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.proxy is None:
            raise KeyboardInterrupt
        self.asked = True
        # After a second one the proxy drops open connections.
        self.proxy.send_signal(number)


def _say(text: str, *, to_errors: bool = False) -> None:
    print(text, file=sys.stderr if to_errors else sys.stdout, flush=True)


def proxy_command(config: Path, host: str, port: int) -> list[str]:
    """The command that starts a stock LiteLLM proxy, as its users start it.

    Raises:
        CompactionError: LiteLLM's proxy is not installed for this interpreter.
    """
    # Looked up, not imported: importing LiteLLM takes seconds.
    missing = [name for name in ("litellm", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise CompactionError(
            f"LiteLLM's proxy is not installed for {sys.executable} (missing: {', '.join(missing)}). "
            "Install it with: pip install 'litellm[proxy]'"
        )
    script = Path(sys.executable).with_name("litellm.exe" if os.name == "nt" else "litellm")
    start = [str(script)] if script.is_file() else [sys.executable, "-c", _RUN_LITELLM]
    return [*start, "--config", str(config), "--host", host, "--port", str(port)]


def proxy_environment(environ: Mapping[str, str], *, master_key: str | None, api_base: str | None) -> dict[str, str]:
    """The caller's environment for the proxy, which fetches nothing from the internet.

    Args:
        master_key, api_base: None if the config has its own.
    """
    own = {KEY_VARIABLE: master_key, "LM_STUDIO_API_BASE": api_base}
    child = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        # The same, and all else that LiteLLM fetches by itself, where it knows the word (1.109).
        "LITELLM_OFFLINE_MODE": "true",
        "LITELLM_TELEMETRY": "False",
        **environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        **{name: value for name, value in own.items() if value is not None},
    }
    # A web proxy of the user's network cannot reach this machine's own LM Studio.
    for name in ("NO_PROXY", "no_proxy"):
        child[name] = ",".join(filter(None, (child.get(name, ""), "127.0.0.1", "localhost")))
    return child


@contextlib.contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], environment: Mapping[str, str], *, output: int | IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process in a session of its own, so that Ctrl-C in the terminal reaches it once, through us.

    It is asked to end with the block, and is killed after 10 s.

    Raises:
        CompactionError: it cannot be started.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
        )
    except OSError as exc:
        raise CompactionError(f"The {name} cannot be started ({exc}).") from exc
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            if exit_code(process, _GRACE_S) is None:
                process.kill()
                process.wait()


def exit_code(process: subprocess.Popen[bytes], wait_s: float | None = None) -> int | None:
    """The exit code as a shell would show it; None if it still runs after `wait_s`."""
    try:
        code = process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return None
    return code if code >= 0 else 128 - code


def wait_until_alive(proxy: subprocess.Popen[bytes], base_url: str, limit_s: float = PROXY_START_LIMIT_S) -> None:
    """Waits for the proxy's first answer.

    Raises:
        ServerUnavailable: it ended, or did not answer in time.
    """
    deadline_s = time.monotonic() + limit_s
    with httpx.Client(trust_env=False, timeout=2.0) as http:
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.HTTPError):
                if http.get(f"{base_url}/health/liveliness").status_code == 200:
                    return
            code = exit_code(proxy, _POLL_S)
            if code is not None:
                raise ServerUnavailable(
                    f"The proxy ended with exit code {code} before it was ready; its own message is above."
                )
    raise ServerUnavailable(f"The proxy did not answer at {base_url}/health/liveliness within {limit_s:g} s.")


def usable_port(host: str, port: int) -> int:
    """`port` itself if it is free, or a free one for 0.

    LiteLLM would silently move to a random port when 4000 is taken (proxy_cli.py, 1.106.2).

    Raises:
        CompactionError: the port is taken, or the address is not this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            if os.name == "posix":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            bound: int = probe.getsockname()[1]
            return bound
    except OSError as exc:
        raise CompactionError(
            f"Cannot listen on {host} port {port} ({exc.strerror or exc}). "
            "Choose another with --port, or --port 0 for any free one."
        ) from exc


def local_url(host: str, port: int) -> str:
    """The URL under which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
