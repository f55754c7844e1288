"""`litellm-compaction connect`: the lines that make a client use this proxy, and the window of a loaded model.

`connect.toml` holds them for each client; docs/clients.md has the windows that they need.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, NamedTuple

import click
import httpx

from litellm_compaction.cli.proxy_process import running_up
from litellm_compaction.errors import CompactionError, ServerUnavailable
from litellm_compaction.master_key import KEY_VARIABLE, ensure_master_key, known_master_key
from litellm_compaction.windows.lmstudio import server_root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CLIENTS: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    resources.files(__package__).joinpath("connect.toml").read_text(encoding="utf-8")
)
# Clients keep so much of the window for an answer; the proxy bounds answers by what is really free.
_KEPT_ANSWER_TOKENS = 8192
_MOST_ANSWER_TOKENS = 16_384
_LIMIT_S = 10.0  # A first listing after the start takes a busy machine over 2 s.
# Words between double quotes, for a shell, a file and a program alike.
_PLAIN = re.compile(r"[\w./:@+ -]+")
_NAMES = re.compile(r"\{(model|url|root|window|answer|prompt|most)\}")


class Place(NamedTuple):
    """The model as the proxy names it, its window, and the proxy's address without /v1."""

    model: str
    window_tokens: int
    base_url: str


@click.command()
@click.option("--model", metavar="NAME", help="As the proxy names it, if several have a window.")
@click.option("--base-url", metavar="URL", help="The proxy, if it is neither a running `up` nor at port 4000.")
@click.argument("client")
def connect(client: str, model: str | None, base_url: str | None) -> int:
    """Print the lines that make a client use the proxy.

    They name the model, and its window where that helps the client. CLIENT is claude, codex, opencode, cline,
    continue, aider, qwen, open-webui, llm, openai-python, openai-node, vercel or langchain.
    """
    if client not in CLIENTS:
        raise click.UsageError(f"{client!r} is none of {', '.join(CLIENTS)}")
    key, up = known_master_key(os.environ), running_up(os.environ)
    base_url = base_url or (up.base_url if up else "http://127.0.0.1:4000")
    place = _place(model, server_root(with_scheme(base_url)), key)
    table = filled(client, place)
    print(f"# {table['title']} with {place.model}, {place.window_tokens:,} tokens")
    if key and not os.environ.get(KEY_VARIABLE, "").strip():
        print(f'export {KEY_VARIABLE}="$(cat {shlex.quote(str(ensure_master_key(dict(os.environ)).path))})"')
    for heading, _, text in sections(table):
        print("\n".join(filter(None, (heading and f"# {heading}", text))))
    warnings = [] if key else [f"{KEY_VARIABLE} is not set: set it to a key of the proxy (`up` makes one)"]
    if (window := place.window_tokens) < table.get("good_tokens", 0):
        least, good = table["least_tokens"], table["good_tokens"]
        what = "too little is left to work with" if window < least else "compactions will be frequent"
        takes = f"{table['title']}'s own prompt takes about {table['prompt_tokens']:,} of the {window:,} tokens"
        warnings.append(f"{takes}: {what}. Load the model with {good:,} or more ({least:,} at least)")
    for warning in warnings:
        print(f"litellm-compaction: {warning}", file=sys.stderr)
    return 0


def with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def filled(client: str, place: Place) -> dict[str, Any]:
    """A client's table with the values of a place."""
    window = place.window_tokens
    answer = min(_KEPT_ANSWER_TOKENS, window // 4)
    most = max(min(_MOST_ANSWER_TOKENS, window - CLIENTS[client].get("prompt_tokens", 0)), answer)
    values = {"model": place.model, "url": f"{place.base_url}/v1", "root": place.base_url}
    values |= {"window": str(window), "answer": str(answer), "prompt": str(window - answer), "most": str(most)}
    written = json.dumps(CLIENTS[client])
    table: dict[str, Any] = json.loads(_NAMES.sub(lambda found: json.dumps(values[found[1]])[1:-1], written))
    told = table.pop("told_environment", {})
    if window >= table.get("told_from_tokens", 0):
        table["environment"] = {**table.get("environment", {}), **told}
    return table


def sections(table: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The parts of what a user enters: a heading, the language, and the text of each."""
    lines = [f'export {name}="{value}"' for name, value in table.get("environment", {}).items()]
    if "command" in table:
        lines.append(" ".join(word if word.strip("-").isalpha() else f'"{word}"' for word in table["command"]))
    if lines:
        yield "", "sh", "\n".join(lines)
    if "text" in table:
        yield table.get("file", ""), table["language"], table["text"].strip()
    if "note" in table:
        yield table["note"], "", ""


def windows_at(root: str, key: str | None) -> dict[str, int]:
    """The models that a proxy lists with a window, and their windows in tokens; none that a shell could misread.

    Raises:
        ServerUnavailable: no proxy answers, or it lists no models.
    """
    try:
        with httpx.Client(trust_env=False, timeout=_LIMIT_S) as http:
            answer = http.get(f"{root}/v1/models", headers={b"Authorization": f"Bearer {key}".encode()} if key else {})
        listed = {each["id"]: each.get("max_input_tokens") for each in answer.json()["data"]}
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        todo = "start it (`litellm-compaction up`), or name another with --base-url"
        raise ServerUnavailable(f"No proxy answers at {root}: {todo}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        todo = f"is it a LiteLLM proxy, and {KEY_VARIABLE} its key?"
        raise ServerUnavailable(f"{root}/v1/models lists no models (HTTP {answer.status_code}): {todo}") from error
    return {name: window for name, window in listed.items() if isinstance(window, int) and _PLAIN.fullmatch(str(name))}


def _place(model: str | None, root: str, key: str | None) -> Place:
    windows = windows_at(root, key)
    names = f"With a window now: {', '.join(windows) or 'none'}"
    if model is None and len(windows) != 1:
        raise click.UsageError(f"{'choose one with --model' if windows else 'load a model first'}. {names}")
    name = next(iter(windows)) if model is None else model if model in windows else f"lm_studio/{model}"
    if name not in windows:
        raise CompactionError(f"the proxy lists {model!r} without a window, or not at all: load it first. {names}")
    return Place(name, windows[name], root)
