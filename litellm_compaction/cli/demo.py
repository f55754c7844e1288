"""`litellm-compaction demo`: one long conversation without the plug-in and with it, through a real proxy.

Each side has a small simulated LM Studio in this process: its records show the requests, cuts and computed tokens.
One proxy serves both: for a model group with `mode: off` the plug-in changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import click
import httpx
import yaml

from litellm_compaction.cli.proxy_process import local_url, serving, usable_port
from litellm_compaction.cli.up import SIMULATED_MODEL, simulated
from litellm_compaction.core.go_on import GO_ON_START
from litellm_compaction.master_key import KEY_VARIABLE
from litellm_compaction.places import FOLDER_VARIABLE
from litellm_compaction.proxy.config_check import HANDLER
from litellm_compaction.simulator import ChatCall, Reply, RequestRecord, serve

_JsonObject: TypeAlias = dict[str, Any]

_WIDTH, _SIDE_WIDTH, _BAR_WIDTH = 98, 44, 24
_TITLES = ("without the plug-in", "with the plug-in")
_OPENING = f"""\
The same coding agent twice, through one LiteLLM proxy whose plug-in guards only the second. Each
has a simulated LM Studio, with {SIMULATED_MODEL} loaded for {{window:,}} tokens: a full bar.
An agent sends its whole conversation each turn; numbers are the tokens of prompt and answer.
x: cut out of the prompt by the server, so the model never saw it.

{"":20}{_TITLES[0]:<{_SIDE_WIDTH}}  {_TITLES[1]}"""
_PAUSE_S = 0.25
_ANSWER_LIMIT_S = 120.0

_SYSTEM = (
    "You are a coding agent in the repository `ledger`. Work in small steps: read what you need, change it, and "
    "report. Never edit files under migrations/. Amounts are integers in cents. Answer in English."
)
_TASK = (
    "Find out why monthly statements are one cent off for accounts with more than 1,000 bookings, and fix it. "
    "The reference value for account DE-4471 is 128,903.17. Do not change the public API of ledger/totals.py."
)
_REMARK = "Good. Go on with the next module, and keep an eye on how it rounds."
_REPORT = "Now write the whole report: one line for each check that you made, in order."
_FOUND = (
    "It adds values as floats and rounds once at the end; with more than 1,000 bookings the error reaches a cent. I "
    "changed it to integer cents, round half to even, and kept the signature. Account DE-4471 now gives 128,903.17."
)
_TOOL = {"name": "read_file", "description": "Read a text file of the repository.", "parameters": {"type": "object"}}
_MODULES = ("totals", "rounding", "statement", "imports", "export", "booking", "account", "currency", "audit")
# A line of code takes about 20 tokens, one of the report about 25: the report is a little longer than the window.
_WINDOW_TOKENS_PER_LINE, _WINDOW_TOKENS_PER_REPORT_LINE = 205, 22
# More than a line: it holds a number, so it stands only once in the report.
_SEAM_CHARS = 160


@click.command()
@click.option("--turns", type=click.IntRange(1), default=40, metavar="N", help="The number of requests.")
@click.option(
    "--context", "window_tokens", type=click.IntRange(4096), default=8192, metavar="TOKENS", help="The window."
)
@click.option("--fast", is_flag=True, help="Make no pauses for the eye.")
def demo(turns: int, window_tokens: int, fast: bool) -> int:
    """Watch a long conversation in a small window.

    A scripted coding agent works through a real proxy with simulated models, without the plug-in and with it. The
    exit code is 1 if something was lost with it.
    """
    without, with_it = sides = [_Side(title, window_tokens) for title in _TITLES]
    print(_OPENING.format(window=window_tokens), flush=True)
    with _proxy(sides) as http:
        try:
            for turn in range(turns + 1):
                what = "report" if turn == turns else "answers" if turn % 2 else "read_file"
                bars = [side.play(http, turn, is_last=turn == turns) for side in sides]
                print(f"turn {turn + 1:>3} {what:<9}  {'  '.join(bars)}".rstrip(), flush=True)
                for event in (*without.events, *with_it.events):
                    print(event[:_WIDTH].rjust(_WIDTH), flush=True)
                time.sleep(0 if fast else _PAUSE_S)
        finally:
            numbers = with_it.summary()
            for label, number in without.summary().items():
                print(f"{label:<42}{number:>28}{numbers[label]:>28}")
    return 0 if not with_it.losses and with_it.reported == with_it.report else 1


class _Side:
    """One client's conversation, the simulated model that answers it, and the numbers of both for the summary."""

    def __init__(self, title: str, window_tokens: int) -> None:
        self.title, self._window_tokens = title, window_tokens
        # The whole history, resent with every request, as clients do.
        said = (("system", _SYSTEM), ("user", _TASK))
        self._messages: list[_JsonObject] = [{"role": role, "content": text} for role, text in said]
        # Numbered lines, so that a lost or doubled one shows.
        self.report = "\n".join(
            f"{number}. {_path(number)}, line {37 + number}: it is kept in integer cents, as the reference."
            for number in range(1, window_tokens // _WINDOW_TOKENS_PER_REPORT_LINE)
        )
        self.reported = ""
        self._turn = self._compactions = self.losses = 0
        # What came of the newest turn beside its answer.
        self.events: list[str] = []
        self._last_sent: list[_JsonObject] = []
        # Only whole answers are shown: chunks of one token are work that shows nothing.
        self.simulator = simulated(window_tokens, script=self._reply, chunk_tokens=8)

    def play(self, http: httpx.Client, turn: int, *, is_last: bool) -> str:
        """Sends the conversation, adds the answer to it, and draws both; asks for the report in the last turn."""
        self._turn, self.events = turn, []
        if is_last:
            # Two messages of a user's in a row would be one to some templates.
            self._messages += [{"role": "assistant", "content": "Noted."}, {"role": "user", "content": _REPORT}]
        seen, error = len(self.simulator.inference_requests()), ""
        body = {"model": self.title, "messages": self._messages, "tools": [{"type": "function", "function": _TOOL}]}
        try:
            whole = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            answer = whole["choices"][0]["message"]
        except (httpx.HTTPError, ValueError, LookupError) as failure:
            answer, error = {}, f"{type(failure).__name__}: {failure}"
        records = self.simulator.inference_requests()[seen:]
        self.simulator.wait_until(lambda: all(record.outcome != "running" for record in records))
        self.losses += sum(record.truncated for record in records) or bool(error)
        self.reported = answer.get("content") or ""
        self._add(answer)
        # A request for a summary is one message.
        parts = [record for record in records if len(_sent(record)) > 1]
        if error or not parts:
            self.events.append(f"! {self.title}: {' '.join((error or 'the server was not asked').split())}")
            return drawn(0, self._window_tokens, state="FAILED")
        first = parts[0]
        # A prompt that does not begin with the one of the turn before was compacted.
        if _sent(first)[: len(self._last_sent)] != self._last_sent:
            self._compactions += 1
            tokens = f"{first.prompt_tokens:,} tokens now, {records.index(first)} calls for a summary"
            self.events.append(f"⚙ compaction {self._compactions}: {tokens}")
        self._last_sent = _sent(parts[-1])
        for before, part in pairwise(parts):
            tokens = f"{before.prompt_tokens + before.completion_tokens:,} → {part.prompt_tokens:,} tokens"
            self.events.append(f"⚙ restart in mid-answer: {tokens}")
        lost_tokens = first.prompt_tokens - first.kept_tokens
        return drawn(first.prompt_tokens + first.completion_tokens, self._window_tokens, lost_tokens)

    def summary(self) -> dict[str, str]:
        """Returns each number by its name."""
        records, lines = self.simulator.inference_requests(), self.report.splitlines()
        arrived = len({*lines} & {*self.reported.splitlines()})
        return {
            "": self.title,
            "prompts that the server cut or refused": str(self.losses),
            "compactions": str(self._compactions),
            "lines of the report at the end that came": f"{arrived} of {len(lines)}",
            "prompt tokens that the engine computed": f"{sum(record.computed_tokens for record in records):,}",
            "prompt tokens taken from its cache": f"{sum(record.cached_tokens for record in records):,}",
        }

    def _add(self, answer: _JsonObject) -> None:
        """Appends an answer and its sequel: a tool's result, or the user's next remark."""
        calls = answer.get("tool_calls") or []
        said = {"role": "assistant", "content": answer.get("content") or ""}
        code = "\n".join(
            f"    {_MODULES[(self._turn + at) % len(_MODULES)]}_{at} = "
            f"round_half_even(cents_{at * 7 % 13} * {self._turn + at})  # {at}"
            for at in range(self._window_tokens // _WINDOW_TOKENS_PER_LINE)
        )
        self._messages.append({**said, "tool_calls": calls} if calls else said)
        self._messages += [{"role": "tool", "tool_call_id": call["id"], "content": code} for call in calls]
        self._messages += [] if calls else [{"role": "user", "content": _REMARK}]

    def _reply(self, call: ChatCall) -> Reply | None:
        """Called in the simulator's thread; the conversation does not change while a request is open."""
        before, newest = [{}, *call.messages][-2:]
        said = str(newest.get("content"))
        if newest.get("role") == "assistant" or said.startswith(GO_ON_START):
            # The server, or a request, lets the model go on behind the end of its text so far.
            end = (said if newest.get("role") == "assistant" else str(before.get("content")))[-_SEAM_CHARS:]
            return Reply(self.report.partition(end)[2] if end and end in self.report else self.report)
        # A summary may stand before the user's own words; the simulator writes what is asked for otherwise.
        if not said.endswith(self._messages[-1]["content"]):
            return None
        if said.endswith(_REPORT):
            return Reply(self.report)
        if self._turn % 2:
            return Reply(_FOUND)
        path = _path(self._turn // 2)
        return Reply(f"I read `{path}` first.", tool_calls=(("read_file", json.dumps({"path": path})),))


def drawn(used_tokens: int, window_tokens: int, lost_tokens: int = 0, state: str = "") -> str:
    """A bar, which is full with a full window, and the tokens; what the server cut out is a gap in the bar."""
    filled = min(_BAR_WIDTH, round(used_tokens / window_tokens * _BAR_WIDTH))
    lost = -(-lost_tokens * filled // max(1, used_tokens))
    before = (filled - lost) // 2
    bar = "█" * before + "x" * lost + "█" * (filled - lost - before) + "░" * (_BAR_WIDTH - filled)
    return f"{bar} {used_tokens:>7,} {state or (f'CUT -{lost_tokens:,}' if lost else '')}".ljust(_SIDE_WIDTH)


@contextlib.contextmanager
def _proxy(sides: Sequence[_Side]) -> Iterator[httpx.Client]:
    """A proxy before the sides' servers, with a model group named as each side; its client has the key."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serve(side.simulator)) for side in sides]
        folder, key = stack.enter_context(tempfile.TemporaryDirectory()), f"sk-{secrets.token_urlsafe(32)}"
        path, port = Path(folder, "config.yaml"), usable_port("127.0.0.1", 0)
        config = {
            "model_list": [
                {
                    "model_name": side.title,
                    "litellm_params": {"model": f"lm_studio/{SIMULATED_MODEL}", "api_base": f"{server.base_url}/v1"},
                    "model_info": {"compaction": {"mode": "guard" if side is sides[-1] else "off"}},
                }
                for side, server in zip(sides, servers, strict=True)
            ],
            "litellm_settings": {"disable_hf_tokenizer_download": True, "callbacks": [HANDLER]},
            # It shows a compaction with its summary, not one that was written while the picture was drawn.
            "callback_settings": {"litellm_compaction": {"background": "off"}},
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        environ, headers = (
            {**os.environ, FOLDER_VARIABLE: folder, KEY_VARIABLE: key},
            {"Authorization": f"Bearer {key}"},
        )
        stack.enter_context(serving(path, "127.0.0.1", port, environ, is_shown=False))
        with httpx.Client(
            base_url=local_url("127.0.0.1", port), headers=headers, trust_env=False, timeout=_ANSWER_LIMIT_S
        ) as http:
            yield http


def _path(turn: int) -> str:
    return f"ledger/{_MODULES[turn % len(_MODULES)]}.py"


def _sent(record: RequestRecord) -> list[_JsonObject]:
    messages = (record.body or {}).get("messages")
    return messages if isinstance(messages, list) else []
