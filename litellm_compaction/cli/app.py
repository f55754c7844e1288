"""The command line: its commands with their options; errors become one line and an exit code.

Each command's module is imported only when it runs, so that help is there at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import click

from litellm_compaction import __version__
from litellm_compaction.errors import CompactionError

_NAME = "litellm-compaction"
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_MOST = 10**9
_PATH = click.Path(path_type=Path)
_PRINTS = "it prints the lines, and you put them into the client's file"
# Commands and options of an earlier version, and what to do in their place; CHANGELOG.md has them, too.
_REMOVED = {
    "compact": "`count` counts a conversation, and the library compacts one: `from litellm_compaction import compact`",
    "store": "`records` lists and shows what is stored, and `purge` deletes it",
    "show": "`records ID` shows a record, and `records ID --text` its text",
    "undo": "`records ID --undo` forgets a record",
    "redo": "`records ID --undo` forgets a record; a request makes it anew with `metadata.compaction.focus`",
    "pin": "a request pins messages by their words, with `metadata.compaction.pin`",
    "demo --unguarded": "demo shows both sides, without the plug-in and with it",
    "demo --no-color": "demo prints plain text",
    "doctor --json": "the exit code says if there is a problem, and the text names each",
    "connect --write": _PRINTS,
    "connect --yes": _PRINTS,
    "connect --json": "it prints lines for people; the proxy's /v1/models has the names and windows",
    "connect --shell": "it prints variables for a Unix shell; set the same ones in another",
    "connect --lm-studio": "it asks the proxy for its models and windows: name it with --base-url",
    "count --batch": "call count once for each request",
    "count --api-base": "it asks no server; `doctor --probe` compares our count with the server's",
}


class _Harmless:
    """Standard output or error; control characters in words of servers and files are made visible."""

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        if not text.replace("\n", "").replace("\t", "").isprintable():
            from litellm_compaction.events import harmless

            text = harmless(text, keep="\n\t")
        return self._inner.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Program(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        for name in (args[0], *(f"{args[0]} {each.partition('=')[0]}" for each in args[1:])):
            if name in _REMOVED:
                ctx.fail(f"{name} was removed: {_REMOVED[name]}.")
        return super().resolve_command(ctx, args)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: of the command line, without the program's name; None takes the process's own.

    Returns:
        The exit code: 0 done, 1 trouble, 2 wrong arguments, 130 interrupted; for `up`, the proxy's.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with contextlib.redirect_stdout(_Harmless(sys.stdout)), contextlib.redirect_stderr(_Harmless(sys.stderr)):
        try:
            # Not `program.main`: it ends a command whose reader has gone before we can, and names no exit code for ^C.
            with program.make_context(_NAME, given) as context:
                code: int = program.invoke(context)
                return code
        except click.exceptions.Exit as done:
            return done.exit_code
        except click.ClickException as error:
            error.show(sys.stderr)
            return error.exit_code
        except CompactionError as error:
            print(f"{_NAME}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            # The reader has gone (`… | head`); nothing may be written any more, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


_LOOK = {"help_option_names": ["--help"], "show_default": True, "max_content_width": 100}


@click.group(cls=_Program, context_settings=_LOOK, no_args_is_help=False)
@click.version_option(__version__, message=f"{_NAME} %(version)s")
def program() -> None:
    """Keeps conversations with LM Studio inside the context length that is really loaded."""


def _run(module: str, *values: object, **options: object) -> Any:
    """Calls the command's function, which has the name of the command."""
    function = getattr(import_module(f"{__package__}.{module}"), str(click.get_current_context().info_name))
    return function(*values, **options)


def _age_s(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Seconds of an age such as `12h`; a callback of click's."""
    if text is None:
        return None
    if not (text[:-1].isdecimal() and len(text) <= 12 and text[-1:] in _UNITS_S):
        raise click.BadParameter(f"{text!r} is not an age like 90s, 15m, 12h, 30d or 8w", context, option)
    return float(int(text[:-1]) * _UNITS_S[text[-1]])


_config = click.option("--config", type=_PATH, metavar="PATH", help="The proxy's config.yaml.")
_scope = click.option("--scope", metavar="S", help="One scope alone, as `records` shows it; its beginning will do.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON: one object a line.")


def _at_store(command: Callable[..., Any]) -> Callable[..., int]:
    """Adds the options that say which store is meant; the command gets it, and is awaited where it has to be."""

    @click.option("--store", metavar="URL", help="The store, if it is neither the config's nor the user's own.")
    @_config
    @functools.wraps(command)
    def with_place(store: str | None, config: Path | None, **options: Any) -> int:
        from litellm_compaction.cli.stores import chosen

        place = chosen(store, config, os.environ)
        return place.done(command(place, **options))

    return with_place


@program.command()
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65_535), default=4000, metavar="PORT", help="0 takes a free port.")
@_config
@click.option("--simulator", is_flag=True, help="Use the simulator even if LM Studio answers.")
@click.option("--lm-studio", metavar="URL", help="Where LM Studio listens, if not at port 1234.")
@click.option("--force", is_flag=True, help="Start even if `doctor` finds a problem.")
@click.option("--verbose", is_flag=True, help="Show all that LiteLLM says while it starts.")
def up(**options: Any) -> Any:
    """Start a LiteLLM proxy with the plug-in.

    Without --config it runs the config.yaml that comes with this package, in front of LM Studio. If no LM Studio
    answers, a simulator takes its place. If LM_STUDIO_API_BASE is set, or the config names a model, the command waits
    for LM Studio instead.
    """
    return _run("up", **options, environ=os.environ)


@program.command()
@click.option("--fast", is_flag=True, help="Make no pauses for the eye.")
@click.option("--turns", type=click.IntRange(1, _MOST), default=40, metavar="N", help="The number of requests.")
@click.option("--context", type=click.IntRange(4096, _MOST), default=8192, metavar="TOKENS", help="Context length.")
def demo(context: int, **options: Any) -> Any:
    """Watch a long conversation in a small window.

    A scripted coding agent works through a real proxy with simulated models, without the plug-in and with it.
    """
    return _run("demo", **options, context_tokens=context, environ=os.environ)


@program.command()
@_config
@click.option("--probe", is_flag=True, help="Compare our count with each loaded model's, by two 16-token requests.")
def doctor(**options: Any) -> Any:
    """Check a config.yaml and the servers that it names.

    It says for each deployment if it is guarded, with which window, and what is wrong. Without --config it reads the
    config of an `up` that runs, otherwise config.yaml in this folder, otherwise the one that comes with this package.
    """
    return _run("doctor", **options, environ=os.environ)


@program.command()
@click.option("--model", metavar="NAME", help="As the proxy names it, if several are loaded.")
@click.option("--base-url", metavar="URL", help="The proxy, if it is neither a running `up` nor at port 4000.")
@click.argument("client")
def connect(**options: Any) -> Any:
    """Print the lines that make a client use the proxy.

    They name the model, and its window where that helps the client. CLIENT is claude, codex, opencode, cline,
    continue, aider, qwen, open-webui, llm, openai-python, openai-node, vercel or langchain.
    """
    return _run("connect", **options, environ=os.environ)


@program.command()
@click.option("--model", required=True, metavar="NAME", help="The model, as LM Studio names it.")
@click.option("--tokenizer", default="", metavar="PATH", help="A tokenizer.json, or what else the setting takes.")
@_json
@click.argument("file")
def count(**options: Any) -> Any:
    """Count the tokens of a request.

    FILE holds {"messages": […], "tools": […]}, or a list of messages; with - it is the standard input. The model's
    own vocabulary counts, as far as this package or the file has it.
    """
    return _run("count", **options)


@program.command()
@click.option("--follow", is_flag=True, help="Go on with new events until Ctrl-C.")
@click.option("--last", type=click.IntRange(1, _MOST), default=50, metavar="N", help="The number of events.")
@_json
@_at_store
def events(*place: Any, **options: Any) -> Any:
    """Show what was compacted, when and why.

    These are the events that the proxies keep in their store, oldest first. They hold no text of a conversation.
    """
    return _run("stores", *place, **options)


@program.command()
@click.option("--text", is_flag=True, help="Show the conversation's text, too, if originals are kept.")
@click.option("--undo", "forget", is_flag=True, help="Forget the record, and those that go on from it.")
@click.argument("record", required=False)
@_at_store
def records(*place: Any, record: str | None, **options: Any) -> Any:
    """List the stored compactions, show one, or forget one.

    The list has no text. RECORD is an id as this list, `events` and the header x-litellm-compaction-record show it;
    its beginning will do. After --undo a conversation is sent as it is, while it fits.
    """
    return _run("records", *place, beginning=record, **options)


@program.command()
@_scope
@click.option("--last", type=click.IntRange(1, 100), default=5, metavar="N", help="The number of hits at most.")
@_json
@click.argument("query")
@_at_store
def recall(*place: Any, **options: Any) -> Any:
    """Search the messages that compactions covered.

    It shows text, of all tenants. QUERY is words, ids, a handle or code. The master key that encrypts them
    is the config's, otherwise LITELLM_MASTER_KEY, otherwise the one in the data folder.
    """
    return _run("stores", *place, **options)


@program.command()
@_scope
@click.option("--older-than", "older_than_s", callback=_age_s, metavar="AGE", help="Unused so long: 90s, 12h, 30d.")
@click.option("--all", "everything", is_flag=True, help="Everything, with the history.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_at_store
def purge(*place: Any, **options: Any) -> Any:
    """Delete stored compactions and their originals.

    It says how many it will delete, and asks first.
    """
    return _run("stores", *place, **options)


@program.command()
@click.option("--url", default="http://127.0.0.1:4000", metavar="URL", help="The proxy's address, without /v1.")
def mcp(url: str) -> Any:
    """Serve the search to an MCP client.

    A client that starts this command gets search_history and get_message over stdin and stdout. They ask the proxy for
    messages that compactions dropped from the conversations of one key: LITELLM_KEY, otherwise the master key.
    """
    import httpx

    from litellm_compaction.cli.mcp import mcp
    from litellm_compaction.master_key import known_master_key

    key = os.environ.get("LITELLM_KEY") or known_master_key(os.environ)
    if not key:
        raise click.UsageError("LITELLM_KEY is not set: set it to a key of the proxy")
    headers = {b"Authorization": f"Bearer {key}".encode()}
    try:
        http = httpx.Client(base_url=f"{url.rstrip('/')}/", headers=headers, timeout=30, trust_env=False)
    except httpx.InvalidURL as error:
        raise click.UsageError(f"{url!r} is not the address of a proxy") from error
    with http:
        return mcp(sys.stdin, http)
