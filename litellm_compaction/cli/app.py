"""Which command is meant, with which options; errors become one line and an exit code.

Called by the console script. Each command's module is imported only when it is asked for. The text of an argument
becomes what it means, or argparse's own error that says what is allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, get_args

from litellm_compaction import __version__
from litellm_compaction.core.prompts import StrategyName
from litellm_compaction.errors import CompactionError
from litellm_compaction.events import harmless

if TYPE_CHECKING:
    from litellm_compaction.stores import Store


_DEMO_TOKENS = 4096
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def port(text: str) -> int:
    """A TCP port; 0 for any that is free."""
    return _whole(text, 0, 65_535, "a port (0–65535)")


def positive(text: str) -> int:
    """How many of something."""
    return _whole(text, 1, 10**9, "a number from 1")


def tokens(text: str) -> int:
    """A context length that a record and a request fit into."""
    return _whole(text, 1024, 100_000_000, "a number of tokens from 1024")


def demo_tokens(text: str) -> int:
    """A context length that the demo's conversation fits into."""
    least = _DEMO_TOKENS
    return _whole(text, least, 100_000_000, f"a number of tokens from {least}")


def age_s(text: str) -> float:
    """An age, in seconds."""
    if not (text[:-1].isdecimal() and text[-1:] in _UNITS_S):
        raise argparse.ArgumentTypeError(f"{text!r} is not an age like 90s, 15m, 12h, 30d or 8w")
    return float(int(text[:-1]) * _UNITS_S[text[-1]])


def _whole(text: str, least: int, most: int, what: str) -> int:
    # `isdigit` alone takes "²", which `int` does not.
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


class _Harmless:
    """Standard output or error, where what servers and files say commands no terminal, whoever writes it.

    Args:
        inner: where it goes.
        keep: what is wanted all the same.
    """

    def __init__(self, inner: TextIO, keep: str) -> None:
        self._inner = inner
        self._keep = keep

    def write(self, text: str) -> int:
        """Writes `text`, made harmless."""
        return self._inner.write(harmless(text, keep=self._keep))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command: 0 done, 1 trouble, 2 wrong arguments, 130 interrupted; for `up`, the proxy's."""
    options = parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    # The demo draws, and shows nobody's words but its own.
    keep = "\n\t\x1b" if options.draws else "\n\t"
    output, errors = _Harmless(sys.stdout, keep), _Harmless(sys.stderr, keep)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            return command(options)
    except CompactionError as error:
        print(f"litellm-compaction: {harmless(str(error), keep=chr(10))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone (`… | head`); nothing may be written any more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="litellm-compaction",
        description="Keeps conversations with LM Studio inside the context length that is really loaded.",
    )
    top.add_argument("--version", action="version", version=f"litellm-compaction {__version__}")
    top.set_defaults(draws=False)
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_up(commands.add_parser("up", help="start a LiteLLM proxy with the plug-in in front of LM Studio"))
    _add_demo(commands.add_parser("demo", help="watch a long conversation stay inside a small window"))
    _add_doctor(commands.add_parser("doctor", help="check a config.yaml and the servers that it names"))
    _add_count(commands.add_parser("count", help="count the tokens of a request"))
    _add_compact(commands.add_parser("compact", help="show what would be made of a conversation, or make it"))
    _add_events(commands.add_parser("events", help="show what was compacted, when and why"))
    _add_store(commands.add_parser("store", help="look at stored compactions, or delete them"))
    return top


def _add_up(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Starts a stock LiteLLM proxy with the shipped config.yaml in front of LM Studio, "
        "or of a simulator where no LM Studio answers."
    )
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    command.add_argument("--port", type=port, default=4000, help="port; 0 takes a free one (default %(default)s)")
    command.add_argument("--config", type=Path, metavar="PATH", help="a config.yaml of your own")
    where = command.add_mutually_exclusive_group()
    where.add_argument("--simulator", action="store_true", help="use the simulator even where LM Studio answers")
    where.add_argument(
        "--lm-studio", metavar="URL", help="where LM Studio listens (default LM_STUDIO_API_BASE, then port 1234)"
    )
    command.set_defaults(command=_up)


def _add_demo(command: argparse.ArgumentParser) -> None:
    command.description = "Runs a scripted coding agent through a real proxy and shows the window filling turn by turn."
    command.add_argument("--fast", action="store_true", help="no pauses for the eye")
    command.add_argument("--no-color", action="store_true", help="plain text, as without a terminal")
    command.add_argument("--turns", type=positive, default=40, metavar="N", help="requests (default %(default)s)")
    command.add_argument(
        "--context", type=demo_tokens, default=8192, metavar="TOKENS", help="context length (default %(default)s)"
    )
    command.add_argument(
        "--unguarded", action="store_true", help="the same conversation without the plug-in, for comparison"
    )
    command.set_defaults(command=_demo, draws=True)


def _add_doctor(command: argparse.ArgumentParser) -> None:
    command.description = "Says for each deployment whether it is guarded, with which window, and what is wrong."
    command.add_argument(
        "--config", type=Path, metavar="PATH", help="default: config.yaml in this folder, else the shipped one"
    )
    command.add_argument(
        "--probe", action="store_true", help="compare our count with each loaded model's, by two 16-token requests"
    )
    _add_json(command, "the report as JSON")
    command.set_defaults(command=_doctor)


def _add_count(command: argparse.ArgumentParser) -> None:
    command.description = 'Counts the tokens of a request {"messages": […], "tools": […]}, as the proxy would.'
    command.add_argument("--model", metavar="NAME", help="as LM Studio names it; for --batch where a line has none")
    _add_api_base(command, "where LM Studio listens")
    command.add_argument(
        "--tokenizer", metavar="PATH", help="a .gguf or tokenizer.json, or what else the setting `tokenizer` takes"
    )
    _add_json(command, "the count as JSON")
    command.add_argument(
        "--batch",
        action="store_true",
        help='one {"model", "messages", "tools"} per input line, one {"tokens"} or {"error"} per output line',
    )
    command.add_argument("file", metavar="FILE", help="the request; - reads from the standard input")
    command.set_defaults(command=_count)


def _add_compact(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Compacts the conversation in a file as the proxy would, and says what is kept, edited, summarized and dropped."
    )
    command.add_argument("file", metavar="FILE", help='JSON: {"messages": …, "tools": …}, or the messages; - is stdin')
    command.add_argument("--model", required=True, metavar="NAME", help="who gets the conversation, and summarizes it")
    command.add_argument("--window", required=True, type=tokens, metavar="TOKENS", help="its context length")
    command.add_argument("--strategy", choices=get_args(StrategyName), help="how the older part is condensed")
    command.add_argument("--keep-recent", type=positive, metavar="N", help="recent messages that stay as they are")
    _add_api_base(command, "who writes the summary")
    command.add_argument("--dry-run", action="store_true", help="only say what would be done; no model is asked")
    _add_json(command, "the report, and the new request, as JSON")
    command.add_argument("-o", "--output", type=Path, metavar="PATH", help="write the new request to a file")
    command.set_defaults(command=_compact)


def _add_events(command: argparse.ArgumentParser) -> None:
    command.description = "Shows the history that the proxies keep in their store, oldest first; never any text."
    command.add_argument("--follow", action="store_true", help="go on with new events until Ctrl-C")
    _add_json(command, "one JSON object a line")
    command.add_argument("--last", type=positive, default=50, metavar="N", help="how many (default %(default)s)")
    _add_place(command)
    command.set_defaults(command=_events)


def _add_store(command: argparse.ArgumentParser) -> None:
    command.description = "Looks at the compactions that the proxies keep, or deletes them."
    actions = command.add_subparsers(title="actions", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="one line for each compaction, without text")
    _add_place(listing)
    listing.set_defaults(command=_store_ls)
    show = actions.add_parser("show", help="one compaction with its summary and ledger, which are conversation text")
    show.add_argument("id", metavar="ID", help="as `store ls` and `events` show it; its beginning will do")
    _add_place(show)
    show.set_defaults(command=_store_show)
    purge = actions.add_parser("purge", help="delete compactions, after a question")
    purge.add_argument("--scope", metavar="S", help="those of one scope, as `store ls` shows it")
    purge.add_argument("--older-than", type=age_s, metavar="AGE", help="unused for so long: 90s, 12h, 30d, 8w")
    purge.add_argument("--all", action="store_true", help="everything, with the history")
    purge.add_argument("--yes", action="store_true", help="do not ask")
    _add_place(purge)
    purge.set_defaults(command=_store_purge)


def _add_place(command: argparse.ArgumentParser) -> None:
    place = command.add_mutually_exclusive_group()
    place.add_argument("--store", metavar="URL", help="the store (default: the one in the user's data folder)")
    place.add_argument("--config", type=Path, metavar="PATH", help="the config.yaml that names it")


def _add_json(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--json", action="store_true", help=what)


def _add_api_base(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--api-base", metavar="URL", help=f"{what} (default LM_STUDIO_API_BASE, then port 1234)")


def _up(options: argparse.Namespace) -> int:
    from litellm_compaction.cli.up import up

    return up(
        host=options.host,
        port=options.port,
        config=options.config,
        simulator=options.simulator,
        lm_studio=options.lm_studio,
        environ=os.environ,
    )


def _demo(options: argparse.Namespace) -> int:
    from litellm_compaction.cli.demo import demo

    return demo(
        turns=options.turns,
        context_tokens=options.context,
        fast=options.fast,
        color=not options.no_color and sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
        guarded=not options.unguarded,
        environ=os.environ,
    )


def _doctor(options: argparse.Namespace) -> int:
    from litellm_compaction.cli.doctor import doctor

    return doctor(config=options.config, as_json=options.json, probes=options.probe, environ=os.environ)


def _count(options: argparse.Namespace) -> int:
    from litellm_compaction.cli.count import count

    return count(
        options.file,
        model=options.model or "",
        api_base=options.api_base,
        tokenizer=options.tokenizer or "",
        as_json=options.json,
        batch=options.batch,
        environ=os.environ,
    )


def _compact(options: argparse.Namespace) -> int:
    from litellm_compaction.cli.compact import Options, compact

    chosen = Options(
        model=options.model,
        window_tokens=options.window,
        strategy=options.strategy,
        keep_recent=options.keep_recent,
        api_base=options.api_base,
        dry_run=options.dry_run,
        json=options.json,
        output=options.output,
    )
    return compact(options.file, chosen, os.environ)


def _events(options: argparse.Namespace) -> int:
    from litellm_compaction.cli.events import events

    return events(_place(options), last=options.last, follow=options.follow, as_json=options.json)


def _store_ls(options: argparse.Namespace) -> int:
    from litellm_compaction.cli.stores import ls

    return ls(_place(options))


def _store_show(options: argparse.Namespace) -> int:
    from litellm_compaction.cli.stores import show

    return show(_place(options), options.id)


def _store_purge(options: argparse.Namespace) -> int:
    from litellm_compaction.cli.stores import purge

    return purge(
        _place(options),
        scope=options.scope,
        older_than_s=options.older_than,
        everything=options.all,
        ask=not options.yes,
    )


def _place(options: argparse.Namespace) -> Store:
    from litellm_compaction.cli.stores import chosen_store

    return chosen_store(options.store, options.config, os.environ)
