"""Condenses the old part of a conversation: one object for each strategy, found by its name.

A strategy has the words for a model, and says which messages make way. A further one is a prompt in a Markdown file and
one `Strategy` in the table below, or a `register` from anywhere else (docs/contributing.md has an example).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from litellm_compaction.core.messages import Message
from litellm_compaction.core.prompts import filled
from litellm_compaction.core.rounds import cleaned_history, with_every_result

_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
# Rungs of compactions that no strategy has made.
_TAKEN = frozenset({"edit", "truncate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to condense the old part of a conversation.

    Attributes:
        name: in settings, events and stored compactions.
        prompt: it begins with the same words every time, and says that the conversation is data; `{words}` and the
            other placeholders become numbers.
        brief_prompt: the same in a few words, for small windows; "" if the prompt serves there, too.
        keeps_recent: the recent messages stay after the record. If not, all but the protected tail makes way, and each
            record is a whole one: no segment is added to an earlier one.
        writer: the strategy whose prompt writes the record; "" is this one. If it is another one, the model is asked
            first which messages may go, with this strategy's prompt (`core/pruning.py` reads the answer), and the
            writer's turn comes if that does not do.
        cleans: the history that the model is shown never ends in a tool's words.
        lead_in: stands between the record and the user's words that follow; "" for nothing.
    """

    name: str
    prompt: str
    brief_prompt: str = ""
    keeps_recent: bool = True
    writer: str = ""
    cleans: bool = False
    lead_in: str = ""

    @property
    def chooses(self) -> bool:
        """A model is asked first which messages may go."""
        return bool(self.writer)

    def instruction(self, *, words: int, round_number: int, is_brief: bool = False) -> str:
        """The prompt for at most `words` words and the `round_number`-th compaction (1 is the first)."""
        prompt = (is_brief and self.brief_prompt) or self.prompt
        return filled(prompt, {"words": words, "round": round_number})

    def history(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as the summariser gets them."""
        return cleaned_history(messages) if self.cleans else with_every_result(messages)


_table: dict[str, Strategy] = {}
STRATEGIES: Mapping[str, Strategy] = MappingProxyType(_table)


def register(strategy: Strategy) -> Strategy:
    """Adds a strategy to the table; the same name again replaces it.

    Raises:
        ValueError: the name cannot be used, the writer is unknown or chooses itself, or the prompt lacks a placeholder.
    """
    if not _NAME.fullmatch(strategy.name) or strategy.name in _TAKEN:
        raise ValueError(f"strategy {strategy.name!r}: allowed are letters, digits and _, and no {sorted(_TAKEN)}")
    if strategy.writer and (strategy.writer not in _table or _table[strategy.writer].chooses):
        raise ValueError(f"strategy {strategy.name!r}: its writer {strategy.writer!r} is no strategy that writes")
    required = ("{words}", "{target_tokens}") if strategy.chooses else ("{words}",)
    missing = [name for name in required if name not in strategy.prompt or name not in (strategy.brief_prompt or name)]
    if missing:
        raise ValueError(f"strategy {strategy.name!r}: its prompt is without {missing[0]}")
    _table[strategy.name] = strategy
    return strategy


def writer_of(name: str) -> str:
    """The name of the strategy whose prompt writes the record."""
    return _table[name].writer or name


def is_level(name: str) -> bool:
    """Returns False for the level of a stored compaction whose strategy is not there any more."""
    return name in _TAKEN or name in _table


def chooses(level: str) -> bool:
    """Returns True if a compaction was made by a model's choice of messages; `level` is `Compaction.level`."""
    return level in _table and _table[level].chooses


def lead_in(level: str) -> str:
    """Stands between a record and the user's words that follow; `level` as in `chooses`."""
    return _table[level].lead_in if level in _table else ""


def without_lead_in(text: str) -> str:
    """The user's words after a record, without the strategy's lead-in."""
    found = next((each.lead_in for each in _table.values() if each.lead_in and text.startswith(each.lead_in)), "")
    return text.removeprefix(found)


def _prompt(name: str) -> str:
    return resources.files(__name__).joinpath(f"{name}.md").read_text(encoding="utf-8").rstrip("\n")


register(Strategy(name="summary", prompt=_prompt("summary"), brief_prompt=_prompt("summary.brief")))
register(Strategy(name="prune", prompt=_prompt("prune"), writer="summary"))
register(
    Strategy(
        name="handoff",
        prompt=_prompt("handoff"),
        brief_prompt=_prompt("handoff.brief"),
        keeps_recent=False,
        cleans=True,
        lead_in="Last request from user was: ",
    )
)
