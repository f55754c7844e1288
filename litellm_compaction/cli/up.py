"""`litellm-compaction up`: a stock proxy with the plug-in, in front of LM Studio or of the simulator."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import httpx

from litellm_compaction.cli.config_file import ConfigFile, read_config, shipped_config
from litellm_compaction.cli.connect import windows_at, with_scheme
from litellm_compaction.cli.doctor import examined
from litellm_compaction.cli.proxy_process import Running, local_url, noted, serving, usable_port
from litellm_compaction.config import settings_from
from litellm_compaction.errors import CompactionError, ConfigError
from litellm_compaction.master_key import KEY_VARIABLE, ensure_master_key
from litellm_compaction.places import ENVIRONMENT_PREFIX
from litellm_compaction.proxy.config_check import API_BASE_VARIABLE, Finding
from litellm_compaction.windows.fetch import without_userinfo
from litellm_compaction.windows.lmstudio import DEFAULT_ADDRESS, server_root

if TYPE_CHECKING:
    from litellm_compaction.simulator import Simulator
    from litellm_compaction.simulator.simulator import Script

# No model of LM Studio's has such a name, so nobody takes its answers for a real model's.
SIMULATED_MODEL = "simulated-qwen3-8b"
_SIMULATED_TOKENS = 8192
# A server that generates may be slow to answer; one that is not there refuses at once.
_ANSWER_LIMIT_S = 5
_say = functools.partial(print, flush=True)


@click.command()
@click.option("--config", type=click.Path(path_type=Path), metavar="PATH", help="The proxy's config.yaml.")
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65_535), default=4000, metavar="PORT", help="0 takes a free port.")
@click.option("--simulator", is_flag=True, help="Use the simulator even if LM Studio answers.")
@click.option("--lm-studio", metavar="URL", help="Where LM Studio listens, if not at port 1234.")
@click.option("--force", is_flag=True, help="Start even if `doctor` finds a problem.")
def up(config: Path | None, host: str, port: int, simulator: bool, lm_studio: str | None, force: bool) -> int:
    """Start a LiteLLM proxy with the plug-in.

    Without --config it runs the config.yaml that comes with this package, in front of LM Studio. If no LM Studio
    answers, a simulator takes its place, unless --lm-studio or LM_STUDIO_API_BASE says where it will be, or the config
    names a model: then requests fail until LM Studio is started. Ctrl-C ends it.
    """
    file = read_config(config or shipped_config())
    has_page = settings_from(file.settings).page == "on"
    if _are_told(file.findings(os.environ)) and not force:
        return 1
    port = usable_port(host, port)
    with _upstream(file, simulator, lm_studio, os.environ) as (api_base, is_simulated):
        environ = {**os.environ, **({API_BASE_VARIABLE: api_base} if api_base else {})}
        if _are_told(asyncio.run(examined(file, environ))[1]) and not force:
            return 1
        # Made last, so that a key that is shown only once is never made by a start that fails before.
        key, words, in_shell = _key(file, environ)
        _say(f"{words}\nStarting LiteLLM's proxy with {file.path} …")
        note = Running(local_url(host, port), str(file.path), api_base, is_simulated)
        with noted(note, environ), serving(file.path, host, port, environ, is_shown=True) as proxy:
            _say(f"\nReady at {note.base_url}/v1 (the base URL for clients), Ctrl-C ends it.")
            if is_simulated:
                _say("It serves a SIMULATOR, not LM Studio: answers are canned.")
            if has_page:
                _say(f"Settings and history: {note.base_url}/compaction, opened with the master key.")
            _say(_request(note.base_url, key, in_shell, file))
            code = proxy.wait()
            return code if code >= 0 else 128 - code


def _are_told(findings: Iterable[Finding]) -> bool:
    """Shows the problems; True if one of them stays until somebody does something."""
    problems = [finding for finding in findings if finding.level == "problem"]
    for finding in problems:
        print(f"litellm-compaction: {finding.place}: {finding.message}", file=sys.stderr)
    stays = any(not finding.passes for finding in problems)
    if stays:
        print("--force starts the proxy all the same.", file=sys.stderr)
    return stays


def _request(base_url: str, key: str | None, in_shell: str, file: ConfigFile) -> str:
    """A request to paste into a shell, for a model that the proxy lists with a window, else the config's first one."""
    written = (str(entry.get("model_name")) for entry in file.deployments)
    model = next((name for name in written if not set("*'") & set(name)), "lm_studio/MODEL")
    with contextlib.suppress(CompactionError):
        model = next(iter(windows_at(base_url, key)), model)
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"Try:\n\ncurl {base_url}/v1/chat/completions \\\n"
        f'  -H "Authorization: Bearer {in_shell}" \\\n'
        f'  -H "Content-Type: application/json" \\\n'
        f"  -d '{body}'\n"
    )


@contextlib.contextmanager
def _upstream(
    file: ConfigFile, simulator: bool, lm_studio: str | None, environ: Mapping[str, str]
) -> Iterator[tuple[str | None, bool]]:
    """LM Studio's address, or None if the config says it; and if it is a simulator's."""
    models = file.models_by_environment
    real = next((model for model in models if "*" not in model and model != SIMULATED_MODEL), None)
    if not models and (simulator or lm_studio):
        todo = f"write `api_base: {ENVIRONMENT_PREFIX}{API_BASE_VARIABLE}` there, or leave the option out"
        raise ConfigError(f"{file.path} names its servers itself, not --simulator or --lm-studio: {todo}")
    if simulator and (real or lm_studio):
        what = f"{file.path} names {real}" if real else "--lm-studio names a server"
        raise ConfigError(f"The simulator has {SIMULATED_MODEL} only, and {what}: leave one of them out.")
    if not models:
        _say(f"Servers: those that {file.path} names.")
        yield None, False
        return
    named = lm_studio or environ.get(API_BASE_VARIABLE)
    root = server_root(with_scheme(named or DEFAULT_ADDRESS))
    if not simulator and (named or real or answers(root)):
        _say(f"LM Studio: {without_userinfo(root)}.")
        yield f"{root}/v1", False
        return
    from litellm_compaction.simulator import serve

    reason = "as asked" if simulator else f"because no LM Studio answers at {root}"
    with serve(simulated(_SIMULATED_TOKENS)) as address:
        loaded = f"{SIMULATED_MODEL} loaded with {_SIMULATED_TOKENS:,} tokens"
        _say(f"SIMULATOR, not LM Studio, {reason}: {address.base_url}, {loaded}. Its answers are canned.")
        yield f"{address.base_url}/v1", True


def answers(root: str) -> bool:
    """Returns True if a server answers at LM Studio's address, whatever it says: `doctor` tells if it is another."""
    try:
        # The environment's web proxy must not be asked for a server on this machine or network.
        httpx.get(root, timeout=_ANSWER_LIMIT_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return True


def simulated(context_tokens: int, *, script: Script | None = None, chunk_tokens: int = 1) -> Simulator:
    """Returns a simulator with `SIMULATED_MODEL` loaded, which counts by the vocabulary of the model's family."""
    from litellm_compaction.simulator import Model, Simulator, count_by
    from litellm_compaction.tokenizers.families import family_of
    from litellm_compaction.tokenizers.registry import vocabulary

    count_by(lambda: vocabulary(family_of("", SIMULATED_MODEL).vocabulary).encoding)
    simulator = Simulator([Model(SIMULATED_MODEL)], script=script, chunk_tokens=chunk_tokens, takes_any_name=False)
    simulator.load(SIMULATED_MODEL, context_tokens)
    return simulator


def _key(file: ConfigFile, environ: dict[str, str]) -> tuple[str | None, str, str]:
    """The master key, which `environ` has then, or None if the config has its own; words, and how a shell reads it."""
    written = file.section("general_settings").get("master_key")
    name = written.removeprefix(ENVIRONMENT_PREFIX) if isinstance(written, str) else KEY_VARIABLE
    if name == written:
        return None, f"Master key: the one in {file.path}.", "YOUR-MASTER-KEY"
    if name != KEY_VARIABLE:
        return None, f"Master key: from {name}.", f"${name}"
    key = ensure_master_key(environ)
    if key.path is None:
        return key.key, f"Master key: from {KEY_VARIABLE}.", f"${KEY_VARIABLE}"
    words = f"Master key: in {key.path}."
    if key.created:
        words = f"Master key (new, shown this once): {key.key}\n  kept in {key.path}, readable only by you."
    return key.key, words, f"$(cat {shlex.quote(str(key.path))})"
