"""The command line: its commands, and those that it had; errors become one line and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TextIO

import click

from litellm_compaction import __version__
from litellm_compaction.errors import CompactionError

_NAME = "litellm-compaction"
_COMMANDS = {
    "up": "Start a LiteLLM proxy with the plug-in.",
    "demo": "Watch a long conversation in a small window.",
    "doctor": "Check a config.yaml and the servers that it names.",
    "connect": "Print the lines that make a client use the proxy.",
    "count": "Count the tokens of a request.",
    "events": "Show what was compacted, when and why.",
    "records": "List the stored compactions, show one, or forget one.",
    "recall": "Search the messages that compactions covered.",
    "purge": "Delete stored compactions and their originals.",
    "mcp": "Serve the search to an MCP client.",
}
# Commands of an earlier version, and what to do in their place; CHANGELOG.md has them, and the options that went.
_REMOVED = {
    "compact": "`count` counts a conversation, and the library compacts one: `from litellm_compaction import compact`",
    "store": "`records` lists and shows what is stored, and `purge` deletes it",
    "show": "`records ID` shows a record, and `records ID --text` its text",
    "undo": "`records ID --undo` forgets a record",
    "redo": "`records ID --undo` forgets a record; a request makes it anew with `metadata.compaction.focus`",
    "pin": "a request pins messages by their words, with `metadata.compaction.pin`",
}


class _Harmless:
    """Standard output or error: of words of servers and files it shows control characters and what it cannot show."""

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        if not text.replace("\n", "").isprintable():
            from litellm_compaction.events import harmless

            text = harmless(text, keep="\n\t")
        encoding = self._inner.encoding or "utf-8"
        return self._inner.write(text.encode(encoding, "replace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Program(click.Group):
    """Imports a command's module when the command runs, so that help is there at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Any:
        module = "stores" if cmd_name in ("events", "records", "recall", "purge") else cmd_name
        return getattr(import_module(f"{__package__}.{module}"), cmd_name) if cmd_name in _COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] in _REMOVED:
            ctx.fail(f"{args[0]} was removed: {_REMOVED[args[0]]}.")
        if args[0] not in _COMMANDS:
            ctx.fail(f"{args[0]!r} is no command: there are {', '.join(_COMMANDS)}.")
        return super().resolve_command(ctx, args)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command of the process's own arguments, or of these.

    Returns:
        The exit code: 0 done, 1 trouble, 2 wrong arguments, 130 interrupted; for `up`, the proxy's.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with contextlib.redirect_stdout(_Harmless(sys.stdout)), contextlib.redirect_stderr(_Harmless(sys.stderr)):
        try:
            # Not `program.main`: it ends a command whose reader has gone before we can, and names no exit code for ^C.
            with program.make_context(_NAME, given) as context:
                return int(program.invoke(context))
        except click.exceptions.Exit as done:
            return done.exit_code
        except click.ClickException as error:
            error.show(sys.stderr)
            return error.exit_code
        except CompactionError as error:
            print(f"{_NAME}: {error}", file=sys.stderr)
            return 1
        except (KeyboardInterrupt, click.Abort):
            return 130
        except BrokenPipeError:
            # The reader has gone (`… | head`); nothing may be written any more, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


_LOOK = {"help_option_names": ["--help", "-h"], "show_default": True, "max_content_width": 100}


@click.group(cls=_Program, context_settings=_LOOK, no_args_is_help=False)
@click.version_option(__version__, message=f"{_NAME} %(version)s")
def program() -> None:
    """Keeps conversations with LM Studio inside the context length that is really loaded."""
