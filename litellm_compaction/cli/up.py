"""`litellm-compaction up`: a stock proxy with the plug-in, in front of LM Studio or of the simulator."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from litellm_compaction.cli.children import (
    exit_code,
    local_url,
    proxy_command,
    proxy_environment,
    running,
    signals_to,
    usable_port,
    wait_until_alive,
)
from litellm_compaction.cli.config_file import ConfigFile, read_config, shipped_config
from litellm_compaction.cli.servers import listing_of
from litellm_compaction.config import settings_from
from litellm_compaction.errors import ConfigError, ServerUnavailable
from litellm_compaction.master_key import KEY_VARIABLE, ensure_master_key
from litellm_compaction.proxy.config_check import ENVIRONMENT_PREFIX
from litellm_compaction.windows.fetch import KeyRefused
from litellm_compaction.windows.lmstudio import DEFAULT_ADDRESS, Listing, server_root

_SIMULATED_MODEL, _SIMULATED_TOKENS = "qwen/qwen3-8b", 8192
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Upstream(NamedTuple):
    # None if the config says it.
    api_base: str | None
    # One to try, "" if none is known.
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    # For the proxy's environment; None if the config has its own.
    value: str | None = field(default=None, repr=False)
    # For the user.
    text: str = field(repr=False)
    # How a shell reads it.
    in_shell: str


def up(
    *,
    host: str,
    port: int,
    config: Path | None,
    simulator: bool,
    lm_studio: str | None,
    environ: Mapping[str, str],
) -> int:
    """Runs until the proxy ends or is told to end; the proxy's exit code.

    Problems in the file are said first: a proxy without the handler, say, starts and guards nothing.

    Args:
        port: 0 takes a free one.
        config: None is the shipped one.
        simulator: use the simulator, even if LM Studio answers.
        lm_studio: where LM Studio must answer; None looks at `LM_STUDIO_API_BASE`, then at port 1234.

    Raises:
        CompactionError: something is missing or wrong; nothing is left running.
    """
    path = config or shipped_config()
    file = read_config(path)
    settings = settings_from(file.settings)
    for finding in file.findings(environ):
        if finding.level == "problem":
            _say(f"litellm-compaction: {finding.place}: {finding.message}", to_errors=True)
    port = usable_port(host, port)
    command = proxy_command(path, host, port)
    stopping = _Stopping()
    with signals_to(stopping.on_signal, *_SIGNALS), _upstream(file, simulator, lm_studio, environ) as upstream:
        # Made last, so that a key that is shown only once is never made by a start that fails before.
        key = _key(file, environ)
        _say(key.text)
        base_url = local_url(host, port)
        _say(f"Starting LiteLLM's proxy with {path} …")
        environment = proxy_environment(environ, master_key=key.value, api_base=upstream.api_base)
        with running("proxy", command, environment) as proxy:
            stopping.proxy = proxy
            try:
                wait_until_alive(proxy, base_url)
            except ServerUnavailable as error:
                if not stopping.asked:
                    _say(f"litellm-compaction: {error}", to_errors=True)
                    return exit_code(proxy, 0) or 1
                return exit_code(proxy) or 0
            _say(f"\nReady at {base_url}/v1 (the base URL for clients), Ctrl-C ends it.")
            if settings.page == "on":
                _say(f"Settings and history: {base_url}/compaction, opened with the master key.")
            _say(f"Try:\n\n{_curl(base_url, upstream.model, key.in_shell)}\n")
            return exit_code(proxy) or 0


@contextlib.contextmanager
def _upstream(
    file: ConfigFile, simulator: bool, lm_studio: str | None, environ: Mapping[str, str]
) -> Iterator[_Upstream]:
    if not file.follows_environment:
        if simulator or lm_studio is not None:
            raise ConfigError(
                f"{file.path} names its servers itself, so --simulator and --lm-studio would have no effect. "
                "Write `api_base: os.environ/LM_STUDIO_API_BASE` there, or leave the option out."
            )
        _say(f"Servers: those that {file.path} names.")
        yield _Upstream(None, "")
        return
    url = lm_studio or environ.get("LM_STUDIO_API_BASE") or DEFAULT_ADDRESS
    url = url if "://" in url else f"http://{url}"
    try:
        listing = None if simulator else listing_of(url, environ.get("LM_STUDIO_API_KEY"))
    except KeyRefused as error:
        raise ServerUnavailable(
            f"{error}. Set LM_STUDIO_API_KEY to a token of that server, or use --simulator."
        ) from error
    if listing is not None:
        root = server_root(url)
        model, text = _loaded(listing)
        _say(f"LM Studio: {root} (API {listing.api}), {text}.")
        yield _Upstream(f"{root}/v1", model)
        return
    if lm_studio is not None:
        raise ServerUnavailable(
            f"No LM Studio answers at {url} (2 s limit). Start its server (`lms server start`), or use --simulator."
        )
    reason = "as asked" if simulator else f"because no LM Studio answers at {url}"
    from litellm_compaction.simulator import Model, Simulator, serve

    simulated = Simulator([Model(_SIMULATED_MODEL)])
    simulated.load(_SIMULATED_MODEL, _SIMULATED_TOKENS)
    with serve(simulated) as address:
        _say(
            f"SIMULATOR, not LM Studio, {reason}: {address.base_url}, {_SIMULATED_MODEL} loaded "
            f"with {_SIMULATED_TOKENS:,} tokens. Its answers are canned."
        )
        yield _Upstream(f"{address.base_url}/v1", _SIMULATED_MODEL)


def _loaded(listing: Listing) -> tuple[str, str]:
    """A model to try, and the loaded ones in words."""
    chat = [model for model in listing.models if model.kind == "llm"]
    loaded = [(model.key, copy.context_length) for model in chat for copy in model.instances]
    if loaded:
        windows = ", ".join(f"{key} with {f'{tokens:,}' if tokens else 'unknown'} tokens" for key, tokens in loaded)
        return loaded[0][0], f"loaded: {windows}"
    if chat:
        return chat[0].key, "no model loaded yet (the first request loads one)"
    return "", "no chat model downloaded"


def _key(file: ConfigFile, environ: Mapping[str, str]) -> _Key:
    written = file.section("general_settings").get("master_key")
    variable = written.removeprefix(ENVIRONMENT_PREFIX) if isinstance(written, str) else KEY_VARIABLE
    if variable == written:
        return _Key(text=f"Master key: the one in {file.path}.", in_shell="YOUR-MASTER-KEY")
    if variable != KEY_VARIABLE:
        return _Key(text=f"Master key: from {variable}.", in_shell=f"${variable}")
    key = ensure_master_key(dict(environ))
    if key.path is None:
        return _Key(value=key.key, text=f"Master key: from {KEY_VARIABLE}.", in_shell=f"${KEY_VARIABLE}")
    text = f"Master key: in {key.path}."
    if key.created:
        text = f"Master key (new, shown this once): {key.key}\n  kept in {key.path}, readable only by you."
    return _Key(value=key.key, text=text, in_shell=f"$(cat {shlex.quote(str(key.path))})")


def _curl(base_url: str, model: str, in_shell: str) -> str:
    body = f'{{"model": "lm_studio/{model or "MODEL"}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
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
