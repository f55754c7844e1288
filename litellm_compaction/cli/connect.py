"""`litellm-compaction connect`: the lines that make a client use this proxy, and the window of a loaded model.

`connect.toml` holds them for each client; docs/clients.md shows them.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click
import httpx

from litellm_compaction.cli.client_files import change_of, rendered
from litellm_compaction.cli.running import running_up
from litellm_compaction.cli.servers import listing_of
from litellm_compaction.cli.shells import content_of, quoted, variable
from litellm_compaction.cli.stores import confirmed
from litellm_compaction.errors import CompactionError, ServerUnavailable
from litellm_compaction.master_key import KEY_VARIABLE, ensure_master_key, known_master_key
from litellm_compaction.windows.fetch import without_userinfo
from litellm_compaction.windows.lmstudio import DEFAULT_ADDRESS, match, server_root

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
_SET = ("export {}={}", "$env:{} = {}")
_VARIABLE = re.compile(r"\$\{(\w{1,40}):-([^}]{0,200})\}")
_DEFAULT_PROXY = "http://127.0.0.1:4000"
_SHOWN = ("environment", "command", "lines", "code", "note")
_LIMIT_S = 2.0
_NAMES = re.compile(r"\{(model|url|root|window|answer|prompt|most)\}")


class Place(NamedTuple):
    """The model as the proxy names it, its window, and the proxy's address without /v1."""

    model: str
    window_tokens: int
    base_url: str


def connect(
    *,
    client: str,
    model: str | None,
    base_url: str | None,
    lm_studio: str | None,
    powershell: bool,
    write: bool,
    yes: bool,
    as_json: bool,
    environ: Mapping[str, str],
) -> int:
    """Prints the lines, or merges those of a file into it after a question; 0, or 1 when the answer was no.

    Args:
        model: as the proxy or LM Studio names it; None is the one that is loaded.
        base_url: of the proxy; None is that of an `up` that runs, else port 4000.
        lm_studio: None looks at `LM_STUDIO_API_BASE`, then at the server of an `up` that runs, then at port 1234.

    Raises:
        click.UsageError: no such client, none with a file to write, or several models to choose from.
        CompactionError: the window is not known, or the file cannot be changed.
    """
    if client not in CLIENTS:
        raise click.UsageError(f"{client!r} is none of {', '.join(CLIENTS)}")
    if write and "files" not in CLIENTS[client]:
        raise click.UsageError(f"{client} is not connected by a file: leave out --write")
    if base_url is None:
        live = running_up(environ)
        base_url = _DEFAULT_PROXY if live is None else live.base_url
    root = server_root(base_url if "://" in base_url else f"http://{base_url}")
    if not urlsplit(root).hostname:
        raise click.UsageError(f"{base_url!r} is not the address of a proxy")
    place = _place(model, lm_studio, root, environ)
    table = filled(client, place)
    path = _file(table, environ)
    warnings = [*_warnings(table, place, environ)]
    if as_json:
        shown = {name: value for name, value in table.items() if name in _SHOWN}
        report = {"client": client, **place._asdict(), **shown, "file": path and str(path), "warnings": warnings}
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return 0
    print(f"# {table['title']} with {place.model}, {place.window_tokens:,} tokens")
    key = variable(KEY_VARIABLE, powershell=powershell)
    if not environ.get(KEY_VARIABLE, "").strip() and known_master_key(environ) is not None:
        read = content_of(str(ensure_master_key(dict(environ)).path), powershell=powershell)
        if KEY_VARIABLE in json.dumps([table.get("lines"), table.get("code")]):
            print(_SET[powershell].format(KEY_VARIABLE, f'"{read}"'))
        else:
            # What else runs in the shell need not know it by that name.
            key = read
    for heading, _, text in sections(table, str(path), key=key, powershell=powershell):
        print("\n".join(filter(None, (heading and f"# {heading}", text))))
    for warning in warnings:
        print(f"litellm-compaction: {warning}", file=sys.stderr)
    if not write or path is None:
        return 0
    change = change_of(path, table["lines"], table.get("if_new", {}))
    if not (difference := change.difference()):
        print(f"# {path} has these lines already.")
        return 0
    print(difference)
    if not yes and not confirmed(f"Write {path}?"):
        print("Nothing was written.")
        return 1
    backup = change.write()
    print(f"Written{f'; the old file is {backup}' if backup else ''}.")
    return 0


def filled(client: str, place: Place) -> dict[str, Any]:
    """A client's table with the values of a place."""
    answer_tokens = min(_KEPT_ANSWER_TOKENS, place.window_tokens // 4)
    free_tokens = min(_MOST_ANSWER_TOKENS, place.window_tokens - CLIENTS[client].get("prompt_tokens", 0))
    values: dict[str, str | int] = {
        "model": place.model,
        "url": f"{place.base_url}/v1",
        "root": place.base_url,
        "window": place.window_tokens,
        "answer": answer_tokens,
        "prompt": place.window_tokens - answer_tokens,
        "most": max(free_tokens, answer_tokens),
    }

    def fill(part: Any, *, in_code: bool = False) -> Any:
        if isinstance(part, dict):
            return {fill(key): fill(value, in_code=key == "code") for key, value in part.items()}
        if isinstance(part, list):
            return [fill(value) for value in part]
        if not isinstance(part, str):
            return part
        whole = _NAMES.fullmatch(part)
        if whole is not None and isinstance(values[whole[1]], int):
            return values[whole[1]]
        quoted = {name: json.dumps(str(value), ensure_ascii=False)[1:-1] for name, value in values.items()}
        return _NAMES.sub(lambda found: quoted[found[1]] if in_code else str(values[found[1]]), part)

    table: dict[str, Any] = fill(CLIENTS[client])
    told = table.pop("told_environment", {})
    if place.window_tokens >= table.get("told_from_tokens", 0):
        table["environment"] = {**table.get("environment", {}), **told}
    return table


def sections(
    table: Mapping[str, Any], path: str, *, key: str = "", powershell: bool = False
) -> Iterator[tuple[str, str, str]]:
    """The parts of what a user enters: a heading, the language, and the text of each.

    `key` is how the shell gets it; "" is by its variable.
    """
    key = key or variable(KEY_VARIABLE, powershell=powershell)

    def word(text: str) -> str:
        if text != f"${KEY_VARIABLE}":
            return quoted(text, powershell=powershell)
        return key if powershell and key.startswith("$env:") else f'"{key}"'

    lines = [_SET[powershell].format(name, word(str(value))) for name, value in table.get("environment", {}).items()]
    if "command" in table:
        lines.append(" ".join(map(word, table["command"])))
    if lines:
        yield "", "sh", "\n".join(lines)
    if "lines" in table:
        suffix = Path(path).suffix
        yield path, suffix[1:], rendered(table["lines"], suffix).rstrip()
    if "code" in table:
        yield "", table["language"], table["code"].strip()
    if "note" in table:
        yield table["note"], "", ""


def _place(model: str | None, lm_studio: str | None, root: str, environ: Mapping[str, str]) -> Place:
    if model is not None and (listed := _listed_tokens(model, root, environ)) is not None:
        return Place(model, listed, root)
    live = running_up(environ)
    url = lm_studio or environ.get("LM_STUDIO_API_BASE") or (live and live.api_base) or DEFAULT_ADDRESS
    url = url if "://" in url else f"http://{url}"
    listing = listing_of(url, environ.get("LM_STUDIO_API_KEY"))
    url = without_userinfo(url)
    if listing is None:
        raise ServerUnavailable(f"No LM Studio answers at {url}: start its server, or name another with --lm-studio")
    loaded = [each.key for each in listing.models if each.kind == "llm" and each.instances]
    names = f"Loaded: {', '.join(loaded) or 'none'}"
    if model is None and len(loaded) != 1:
        raise click.UsageError(f"choose one of the loaded models with --model. {names}")
    name = (model or loaded[0]).removeprefix("lm_studio/")
    found = match(listing, name)
    if found is None or found[1] is None or found[1].context_length is None or not name.isprintable():
        raise CompactionError(f"LM Studio at {url} has {name!r} not loaded with a known window: load it first. {names}")
    return Place(f"lm_studio/{name}", found[1].context_length, root)


def _listed_tokens(model: str, root: str, environ: Mapping[str, str]) -> int | None:
    """The window of a model that the proxy names; None if it names none such, or does not answer."""
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, KeyError):
        headers = {"Authorization": f"Bearer {known_master_key(environ) or ''}"}
        with httpx.Client(trust_env=False, timeout=_LIMIT_S) as http:
            models = http.get(f"{root}/v1/models", headers=headers).json()["data"]
        found = [each["max_input_tokens"] for each in models if each["id"] == model]
        return found[0] if found and isinstance(found[0], int) else None
    return None


def _file(table: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """The client's file: the first that exists, else the first whose folder does, else the first."""
    paths = [
        Path(_VARIABLE.sub(lambda found: environ.get(found[1]) or found[2], file)).expanduser()
        for file in table.get("files", ())
    ]
    known = [path for path in paths if path.exists()] + [path for path in paths if path.parent.exists()] + paths
    return known[0] if known else None


def _warnings(table: Mapping[str, Any], place: Place, environ: Mapping[str, str]) -> Iterator[str]:
    if known_master_key(environ) is None:
        yield f"{KEY_VARIABLE} is not set: set it to a key of the proxy (`up` makes one)"
    good_tokens, title = table.get("good_tokens", 0), table["title"]
    if place.window_tokens < good_tokens:
        fails = place.window_tokens < table["least_tokens"]
        least = f" ({table['least_tokens']:,} at least)" if table["least_tokens"] < good_tokens else ""
        yield (
            f"{title}'s own prompt takes about {table['prompt_tokens']:,} of the {place.window_tokens:,} tokens: "
            f"{'too little is left to work with' if fails else 'compactions will be frequent'}. "
            f"Load the model with {good_tokens:,} or more{least}"
        )
