"""The command line: its commands with their options; errors become one line and an exit code.

Each command's module is imported only when it runs: without LiteLLM's import `count` and `doctor` save seconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from litellm_compaction import __version__
from litellm_compaction.cli.shells import IS_WINDOWS
from litellm_compaction.core.strategies import STRATEGIES
from litellm_compaction.errors import CompactionError
from litellm_compaction.events import harmless

if TYPE_CHECKING:
    from litellm_compaction.stores import Originals, Store

_NAME = "litellm-compaction"
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_MOST = 10**9
_PATH = click.Path(path_type=Path)

_Command = TypeVar("_Command", bound=Callable[..., int])


class _Harmless:
    """Standard output or error; control characters in words of servers and files are made visible.

    Args:
        inner: the stream below.
        keep: control characters that pass.
    """

    def __init__(self, inner: TextIO, keep: str) -> None:
        self._inner = inner
        self._keep = keep

    def write(self, text: str) -> int:
        return self._inner.write(harmless(text, keep=self._keep))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _age_s(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Seconds of an age such as `12h`; a callback of click's."""
    if text is None:
        return None
    if not (text[:-1].isdecimal() and len(text) <= 12 and text[-1:] in _UNITS_S):
        raise click.BadParameter(f"{text!r} is not an age like 90s, 15m, 12h, 30d or 8w", context, option)
    return float(int(text[:-1]) * _UNITS_S[text[-1]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: of the command line, without the program's name; None takes the process's own.

    Returns:
        The exit code: 0 done, 1 trouble, 2 wrong arguments, 130 interrupted; for `up`, the proxy's.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # The demo draws, and shows no words but its own.
    keep = "\n\t\x1b" if given[:1] == ["demo"] else "\n\t"
    output, errors = _Harmless(sys.stdout, keep), _Harmless(sys.stderr, keep)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
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


@click.group(context_settings={"help_option_names": ["--help"], "show_default": True}, no_args_is_help=False)
@click.version_option(__version__, message=f"{_NAME} %(version)s")
def program() -> None:
    """Keeps conversations with LM Studio inside the context length that is really loaded."""


def _json(what: str) -> Callable[[_Command], _Command]:
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON.")


def _api_base(what: str) -> Callable[[_Command], _Command]:
    return click.option("--api-base", metavar="URL", help=f"{what} (default: LM_STUDIO_API_BASE, then port 1234).")


def _place(command: Callable[..., int]) -> Callable[..., int]:
    """Adds the options that say which store is meant; the command gets that store."""
    return _beside_originals(lambda store, _, **options: command(store, **options), command)


def _beside_originals(command: Callable[..., int], named: Callable[..., int] | None = None) -> Callable[..., int]:
    """As `_place`; the command gets the originals, too, or None.

    Args:
        named: has the command's name and help, if it is another one.
    """

    @click.option("--store", metavar="URL", help="The store (default: the one in the user's data folder).")
    @click.option("--config", type=_PATH, metavar="PATH", help="The config.yaml that names it.")
    @functools.wraps(named or command)
    def with_store(store: str | None, config: Path | None, **options: Any) -> int:
        from litellm_compaction.cli.stores import chosen

        _only_one_of({"store": store, "config": config}, "store", "config")
        return command(*chosen(store, config, os.environ), **options)

    return with_store


def _removed(option: str, instead: str) -> Callable[[_Command], _Command]:
    """An option of an earlier version, which says what to do in its place; CHANGELOG.md has it, too."""

    def refuse(_context: click.Context, _option: click.Parameter, is_given: bool) -> None:
        if is_given:
            raise click.UsageError(f"{option} was removed: {instead}")

    return click.option(option, is_flag=True, hidden=True, expose_value=False, callback=refuse)


def _only_one_of(options: Mapping[str, object], *names: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if options[name]]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} exclude each other", click.get_current_context())


@program.command(short_help="Start a LiteLLM proxy with the plug-in in front of LM Studio.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65_535), default=4000, metavar="PORT", help="Port; 0 takes a free one.")
@click.option("--config", type=_PATH, metavar="PATH", help="A config.yaml of your own.")
@click.option("--simulator", is_flag=True, help="Use the simulator even where LM Studio answers.")
@click.option(
    "--lm-studio", metavar="URL", help="Where LM Studio listens (default: LM_STUDIO_API_BASE, then port 1234)."
)
@click.option("--force", is_flag=True, help="Start even where `doctor` finds a problem.")
@click.option("--verbose", is_flag=True, help="Show all that LiteLLM says while it starts.")
def up(**options: Any) -> int:
    """Starts a stock LiteLLM proxy with the shipped config.yaml in front of LM Studio.

    Where no LM Studio answers, a simulator takes its place; one that LM_STUDIO_API_BASE or a model's name asks for is
    waited for.
    """
    from litellm_compaction.cli.up import up

    _only_one_of(options, "simulator", "lm_studio")
    return up(**options, environ=os.environ)


@program.command(short_help="Watch a long conversation in a small window, without the plug-in and with it.")
@click.option("--fast", is_flag=True, help="No pauses for the eye.")
@click.option("--no-color", is_flag=True, help="Plain text, as without a terminal.")
@click.option("--turns", type=click.IntRange(1, _MOST), default=40, metavar="N", help="Requests.")
@_removed("--unguarded", "demo shows both sides, without the plug-in and with it")
@click.option("--context", type=click.IntRange(4096, _MOST), default=8192, metavar="TOKENS", help="Context length.")
def demo(no_color: bool, context: int, **options: Any) -> int:
    """Runs a scripted coding agent through a real proxy, and shows its turns without the plug-in and with it."""
    from litellm_compaction.cli.demo import demo

    color = not no_color and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return demo(**options, context_tokens=context, color=color, environ=os.environ)


@program.command(short_help="Check a config.yaml and the servers that it names.")
@click.option(
    "--config",
    type=_PATH,
    metavar="PATH",
    help="Default: that of an `up` that runs, config.yaml here, the shipped one.",
)
@click.option("--probe", is_flag=True, help="Compare our count with each loaded model's, by two 16-token requests.")
@_json("the report")
def doctor(**options: Any) -> int:
    """Says for each deployment whether it is guarded, with which window, and what is wrong."""
    from litellm_compaction.cli.doctor import doctor

    return doctor(**options, environ=os.environ)


@program.command(short_help="Point a client at the proxy.")
@click.option("--model", metavar="NAME", help="As the proxy or LM Studio names it (default: the one that is loaded).")
@click.option("--base-url", metavar="URL", help="The proxy (default: an `up` that runs, then port 4000).")
@click.option(
    "--lm-studio", metavar="URL", help="Where LM Studio listens (default: LM_STUDIO_API_BASE, then port 1234)."
)
@click.option(
    "--shell",
    type=click.Choice(("posix", "powershell")),
    default="powershell" if IS_WINDOWS else "posix",
    help="Who reads the variables.",
)
@click.option("--write", is_flag=True, help="Merge the lines into the client's file, after a question.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_json("the lines")
@click.argument("client")
def connect(shell: str, **options: Any) -> int:
    """Prints the lines that make CLIENT use the proxy and the window of the loaded model.

    CLIENT is claude, codex, opencode, cline, continue, aider, qwen, open-webui, llm, openai-python, openai-node,
    vercel or langchain.
    """
    from litellm_compaction.cli.connect import connect

    _only_one_of(options, "write", "as_json")
    return connect(**options, powershell=shell == "powershell", environ=os.environ)


@program.command(short_help="Count the tokens of a request.")
@click.option("--model", default="", metavar="NAME", help="As LM Studio names it; for --batch where a line has none.")
@_api_base("Where LM Studio listens")
@click.option(
    "--tokenizer",
    default="",
    metavar="PATH",
    help="A .gguf or tokenizer.json, or what else the setting `tokenizer` takes.",
)
@_json("the count")
@click.option(
    "--batch",
    is_flag=True,
    help='One {"model", "messages", "tools"} per input line, one {"tokens"} or {"error"} per output line.',
)
@click.argument("file")
def count(**options: Any) -> int:
    """Counts the tokens of a request {"messages": […], "tools": […]} in FILE, as the proxy would.

    FILE - reads from the standard input.
    """
    from litellm_compaction.cli.count import count

    return count(**options, environ=os.environ)


@program.command(short_help="Show what would be made of a conversation, or make it.")
@click.option("--model", required=True, metavar="NAME", help="Who gets the conversation, and summarizes it.")
@click.option("--window", required=True, type=click.IntRange(1024, _MOST), metavar="TOKENS", help="Its context length.")
@click.option("--strategy", type=click.Choice(tuple(STRATEGIES)), help="How the older part is condensed.")
@click.option(
    "--keep-recent", type=click.IntRange(1, _MOST), metavar="N", help="Recent messages that stay as they are."
)
@_api_base("Who writes the summary")
@click.option("--dry-run", is_flag=True, help="Only say what would be done; no model is asked.")
@_json("the report, and the new request,")
@click.option("-o", "--output", type=_PATH, metavar="PATH", help="Write the new request to a file.")
@click.argument("file")
def compact(**options: Any) -> int:
    """Compacts the conversation in FILE as the proxy would; says what is kept, edited, summarized and dropped.

    FILE is JSON, {"messages": …, "tools": …} or the messages alone; - reads from the standard input.
    """
    from litellm_compaction.cli.compact import compact

    return compact(**options, environ=os.environ)


@program.command(short_help="Show what was compacted, when and why.")
@click.option("--follow", is_flag=True, help="Go on with new events until Ctrl-C.")
@_json("one object a line")
@click.option("--last", type=click.IntRange(1, _MOST), default=50, metavar="N", help="How many.")
@_place
def events(store: Store, **options: Any) -> int:
    """Shows the history that the proxies keep in their store, oldest first; never any text."""
    from litellm_compaction.cli.stores import events

    return events(store, **options)


@program.command(short_help="Search what compactions covered.")
@click.option("--scope", metavar="S", help="In one scope, as `store ls` shows it; its beginning will do.")
@_json("the hits")
@click.option("--last", type=click.IntRange(1, 100), default=5, metavar="N", help="How many hits at most.")
@click.argument("query")
@_beside_originals
def recall(store: Store, originals: Originals | None, **options: Any) -> int:
    """Searches the messages that compactions covered, of all tenants, and shows their text.

    QUERY is words, ids, a handle or code, or /a regular expression/. The master key that encrypts the messages is
    the config's, else LITELLM_MASTER_KEY, else the one in the data folder.
    """
    from litellm_compaction.cli.stores import recall

    return recall(store, originals, **options)


@program.command("show", short_help="Show a record, and the messages before and after.")
@click.option("--text", is_flag=True, help="With the conversation's text, where originals are kept.")
@click.argument("record")
@_beside_originals
def show_record(store: Store, originals: Originals | None, record: str, **options: Any) -> int:
    """Shows a record, of any tenant: its numbers, and with --text the messages that it covers before and after.

    RECORD is its id, as `events`, `store ls` and the header x-litellm-compaction-record show it; its beginning will do.
    """
    from litellm_compaction.cli.records import show

    return show(store, originals, beginning=record, **options)


@program.command("undo", short_help="Forget a record, so that its conversation is sent as it is.")
@click.argument("record")
@_beside_originals
def undo_record(store: Store, originals: Originals | None, record: str) -> int:
    """Forgets a record, of any tenant, with those that go on from it.

    Its conversation is sent as it is while it fits, until more is said. RECORD is its id; its beginning will do.
    """
    from litellm_compaction.cli.records import undo

    return undo(store, originals, beginning=record)


@program.command("redo", short_help="Have a record made anew with a focus.")
@click.option("--focus", required=True, metavar="TOPIC", help="What its summary is to keep in detail.")
@click.argument("record")
@_beside_originals
def redo_record(store: Store, originals: Originals | None, record: str, focus: str) -> int:
    """Forgets a record, of any tenant, with those that go on from it; the next request makes it anew with a focus.

    RECORD is its id; its beginning will do.
    """
    from litellm_compaction.cli.records import undo

    return undo(store, originals, beginning=record, focus=focus)


@program.command(short_help="Serve the search to MCP clients, over stdin and stdout.")
@click.option("--url", default="http://127.0.0.1:4000", metavar="URL", help="The proxy's address, without /v1.")
def mcp(url: str) -> int:
    """Serves search_history and get_message to an MCP client that starts this command.

    They ask the proxy for messages that compactions dropped from the conversations of one key: LITELLM_KEY, else the
    master key.
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


@program.command("pin", short_help="Have a message stay verbatim in later compactions.")
@click.option("--remove", is_flag=True, help="Take the pin away.")
@click.argument("record")
@click.argument("number", type=click.IntRange(1, _MOST))
@_beside_originals
def pin_message(store: Store, originals: Originals | None, record: str, **options: Any) -> int:
    """Has message NUMBER, as `show --text RECORD` counts, stay verbatim in later compactions of its conversation."""
    from litellm_compaction.cli.records import pin

    return pin(store, originals, beginning=record, **options)


@program.group("store", short_help="Look at stored compactions, or delete them.", no_args_is_help=False)
def store_actions() -> None:
    """Looks at the compactions that the proxies keep, or deletes them."""


@store_actions.command(short_help="One line for each compaction, without text.")
@_place
def ls(store: Store) -> int:
    """Lists the stored compactions, one line each, without text."""
    from litellm_compaction.cli.stores import ls

    return ls(store)


@store_actions.command(short_help="One compaction with its text.")
@click.argument("id")
@_place
def show(store: Store, id: str) -> int:  # noqa: A002 - the argument's name is its metavar
    """Shows one compaction with its summary and ledger, which are conversation text.

    ID is as `store ls` and `events` show it; its beginning will do.
    """
    from litellm_compaction.cli.stores import show

    return show(store, id)


@store_actions.command(short_help="Delete compactions, after a question.")
@click.option("--scope", metavar="S", help="Those of one scope, as `store ls` shows it.")
@click.option("--older-than", "older_than_s", callback=_age_s, metavar="AGE", help="Unused so long: 90s, 12h, 30d, 8w.")
@click.option("--all", "everything", is_flag=True, help="Everything, with the history.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_beside_originals
def purge(store: Store, originals: Originals | None, yes: bool, **options: Any) -> int:
    """Deletes stored compactions and the originals that they covered, after a question."""
    from litellm_compaction.cli.stores import purge

    return purge(store, originals, ask=not yes, **options)
