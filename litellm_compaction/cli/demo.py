"""`litellm-compaction demo`: one long conversation without the plug-in and with it, through a real proxy.

Each side has a small simulated LM Studio in this process: its records show the requests, cuts and computed tokens.
One proxy serves both: for a model group with `mode: off` the plug-in changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click
import httpx
import yaml

from litellm_compaction.cli.proxy_process import (
    local_url,
    proxy_command,
    proxy_environment,
    running,
    usable_port,
    wait_until_alive,
)
from litellm_compaction.cli.up import SIMULATED_MODEL, simulated
from litellm_compaction.core.continuation.request import GO_ON_START
from litellm_compaction.errors import CompactionError, ServerUnavailable
from litellm_compaction.places import FOLDER_VARIABLE
from litellm_compaction.proxy.config_check import HANDLER
from litellm_compaction.simulator import ChatCall, Reply, RequestRecord, serve

_JsonObject: TypeAlias = dict[str, Any]

_WIDTH, _SIDE_WIDTH, _BAR_WIDTH = 98, 44, 24
_TITLES = ("without the plug-in", "with the plug-in")
_OPENING = f"""\
The same coding agent twice, through one LiteLLM proxy whose plug-in guards only the second. Each
has a simulated LM Studio, with {{model}} loaded for {{window:,}} tokens: a full bar.
An agent sends its whole conversation each turn; numbers are the tokens of prompt and answer.
x: cut out of the prompt by the server, so the model never saw it.

{"":20}{_TITLES[0]:<{_SIDE_WIDTH}}  {_TITLES[1]}"""
_PAUSE_S = 0.25
_ANSWER_LIMIT_S = 120.0
_LOG_LINES = 15

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
_SUMMARY = (
    "### Original task\nMonthly statements are one cent off for accounts with more than 1,000 bookings; reference "
    "DE-4471 = 128,903.17; the public API of ledger/totals.py must not change.\n"
    "### Completed work\nThe modules that were read add integer cents now, and their tests pass.\n"
    "### Key decisions\nInteger cents, round half to even, because float sums drift.\n### Pending\nThe other callers"
)
_TOOL = {"name": "read_file", "description": "Read a text file of the repository.", "parameters": {"type": "object"}}
_MODULES = ("totals", "rounding", "statement", "imports", "export", "booking", "account", "currency", "audit")
# A line of code takes about 20 tokens, one of the report about 25: the report is a little longer than the window.
_WINDOW_TOKENS_PER_LINE, _WINDOW_TOKENS_PER_REPORT_LINE = 205, 22
# More than a line: it holds a number, so it stands only once in the report.
_SEAM_CHARS = 160


class Filling(NamedTuple):
    """One side of a turn: the tokens of prompt and answer, and those of them that the server cut out."""

    used_tokens: int
    lost_tokens: int = 0
    has_failed: bool = False

    def drawn(self, window_tokens: int) -> str:
        """A bar, which is full with a full window, and the tokens; what the server cut out is a gap in the bar."""
        filled = min(_BAR_WIDTH, round(self.used_tokens / window_tokens * _BAR_WIDTH))
        lost = math.ceil(self.lost_tokens / max(1, self.used_tokens) * filled)
        before = (filled - lost) // 2
        bar = "█" * before + "x" * lost + "█" * (filled - lost - before) + "░" * (_BAR_WIDTH - filled)
        state = "FAILED" if self.has_failed else f"CUT -{self.lost_tokens:,}" if lost else ""
        return f"{bar} {self.used_tokens:>7,} {state}".ljust(_SIDE_WIDTH)


@click.command()
@click.option("--turns", type=click.IntRange(1), default=40, metavar="N", help="The number of requests.")
@click.option(
    "--context", "context_tokens", type=click.IntRange(4096), default=8192, metavar="TOKENS", help="The window."
)
@click.option("--fast", is_flag=True, help="Make no pauses for the eye.")
def demo(turns: int, context_tokens: int, fast: bool) -> int:
    """Watch a long conversation in a small window.

    A scripted coding agent works through a real proxy with simulated models, without the plug-in and with it. The
    exit code is 1 if something was lost with it.
    """
    sides = without, with_it = [_Side(title, context_tokens) for title in _TITLES]
    with (
        serve(without.simulator) as alone,
        serve(with_it.simulator) as guarded,
        tempfile.TemporaryDirectory() as folder,
    ):
        _say(_OPENING.format(model=SIMULATED_MODEL, window=context_tokens))
        key = f"sk-{secrets.token_urlsafe(32)}"
        with _proxy(Path(folder), (alone.base_url, guarded.base_url), key) as http:
            try:
                for turn in range(turns + 1):
                    what = "report" if turn == turns else "answers" if turn % 2 else "read_file"
                    bars = [side.play(http, turn, is_last=turn == turns).drawn(context_tokens) for side in sides]
                    _say(f"turn {turn + 1:>3} {what:<9}  {'  '.join(bars)}")
                    for event in (*without.events, *with_it.events):
                        _say(event.rjust(_WIDTH))
                    time.sleep(0 if fast else _PAUSE_S)
            finally:
                for (label, text), other in zip(without.summary(), with_it.summary(), strict=True):
                    _say(f"{label:<42}{text:>28}{other[1]:>28}")
    return 1 if with_it.losses or not with_it.report_is_whole else 0


class _Side:
    """One client's conversation, the simulated model that answers it, and the numbers of both for the summary."""

    def __init__(self, title: str, window_tokens: int) -> None:
        self._title = title
        # The whole history, resent with every request, as clients do.
        self._messages: list[_JsonObject] = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _TASK},
        ]
        self._lines = window_tokens // _WINDOW_TOKENS_PER_LINE
        # Numbered lines, so that a lost or doubled one shows.
        self._report = "\n".join(
            f"{number}. ledger/{_module(number)}.py, line {37 + number}: it is kept in integer cents, as the reference."
            for number in range(1, window_tokens // _WINDOW_TOKENS_PER_REPORT_LINE)
        )
        self._turn = self._compactions = self._restarts = self.losses = 0
        self._reported: str | None = None
        # What came of the newest turn beside its answer.
        self.events: list[str] = []
        self._last_sent: list[_JsonObject] = []
        # Only whole answers are shown: chunks of one token are work that shows nothing.
        self.simulator = simulated(window_tokens, script=self._reply, chunk_tokens=8)

    @property
    def report_is_whole(self) -> bool:
        return self._reported == self._report

    def play(self, http: httpx.Client, turn: int, *, is_last: bool) -> Filling:
        """Sends the conversation, and adds the answer to it; asks for the report in the last turn."""
        self._turn, self.events = turn, []
        if is_last:
            # Two messages of a user's in a row would be one to some templates.
            self._messages += [{"role": "assistant", "content": "Noted."}, {"role": "user", "content": _REPORT}]
        seen = len(self.simulator.inference_requests())
        answer, error = ask(http, self._title, self._messages)
        records = self.simulator.inference_requests()[seen:]
        self.simulator.wait_until(lambda: all(record.outcome != "running" for record in records))
        self.losses += sum(record.truncated for record in records) or bool(error)
        self._reported = answer.get("content") if is_last else None
        # A request for a summary is one message.
        parts = [record for record in records if len(_sent(record)) > 1]
        self._add(answer)
        if error or not parts:
            self.events.append(f"! {self._title}: {' '.join((error or 'the server was not asked').split())}"[:_WIDTH])
            return Filling(parts[0].prompt_tokens if parts else 0, has_failed=True)
        first = parts[0]
        # A prompt that does not begin with the one of the turn before was compacted.
        if _sent(first)[: len(self._last_sent)] != self._last_sent:
            self._compactions += 1
            calls = records.index(first)
            made = f"{calls} summary call{'s' if calls > 1 else ''}" if calls else "without a model call"
            self.events.append(f"⚙ compaction {self._compactions}: {first.prompt_tokens:,} tokens now ({made})")
        self._last_sent = _sent(parts[-1])
        for before, part in pairwise(parts):
            self._restarts += 1
            tokens = f"{before.prompt_tokens + before.completion_tokens:,} → {part.prompt_tokens:,} tokens"
            self.events.append(f"⚙ restart {self._restarts} in mid-answer: {tokens}")
        lost_tokens = first.prompt_tokens - first.kept_tokens if first.truncated else 0
        return Filling(first.prompt_tokens + first.completion_tokens, lost_tokens)

    def summary(self) -> Sequence[tuple[str, str]]:
        """Returns what each number is, and the number."""
        records = self.simulator.inference_requests()
        lines = self._report.splitlines()
        arrived = len(set(lines) & set((self._reported or "").splitlines()))
        came = "whole" if self.report_is_whole else f"NOT whole, {arrived} lines"
        return (
            ("", self._title),
            ("prompts that the server cut or refused", str(self.losses)),
            ("compactions", str(self._compactions)),
            (f"the report at the end, {len(lines)} lines", "not asked for" if self._reported is None else came),
            ("prompt tokens that the engine computed", f"{sum(record.computed_tokens for record in records):,}"),
            ("prompt tokens taken from its cache", f"{sum(record.cached_tokens for record in records):,}"),
        )

    def _add(self, answer: _JsonObject) -> None:
        """Appends an answer and its sequel: a tool's result, or the user's next remark."""
        calls = answer.get("tool_calls") or []
        said = {"role": "assistant", "content": answer.get("content") or ""}
        self._messages.append({**said, "tool_calls": calls} if calls else said)
        code = "\n".join(
            f"    {_module(self._turn + at)}_{at} = round_half_even(cents_{at * 7 % 13} * {self._turn + at})  # {at}"
            for at in range(self._lines)
        )
        self._messages += [{"role": "tool", "tool_call_id": call["id"], "content": code} for call in calls]
        if not calls:
            self._messages.append({"role": "user", "content": _REMARK})

    def _reply(self, call: ChatCall) -> Reply:
        """Called in the simulator's thread; the conversation does not change while a request is open."""
        newest = call.messages[-1] if call.messages else {}
        said = str(newest.get("content"))
        if newest.get("role") == "assistant":
            # The server lets the model go on inside its own message.
            return Reply(self._rest(said))
        if said.startswith(GO_ON_START):
            return Reply(self._rest(str(call.messages[-2].get("content"))))
        # A summary may stand before the user's own words.
        if not said.endswith(self._messages[-1]["content"]):
            return Reply(_SUMMARY)
        if said.endswith(_REPORT):
            return Reply(self._report)
        path = f"ledger/{_module(self._turn // 2)}.py"
        if self._turn % 2 == 0:
            return Reply(f"I read `{path}` first.", tool_calls=(("read_file", json.dumps({"path": path})),))
        return Reply(
            f"`{path}` adds values as floats in line {37 + self._turn} and rounds once at the end; with more than "
            "1,000 bookings the error reaches a cent. I changed it to integer cents, round half to even, and kept the "
            "signature. Account DE-4471 now gives 128,903.17. Next I look at the callers."
        )

    def _rest(self, shown: str) -> str:
        """The rest of the report, for a model that sees the end of its text so far."""
        end = shown[-_SEAM_CHARS:]
        _, found, rest = self._report.partition(end)
        return rest if end and found else self._report


def ask(http: httpx.Client, model: str, messages: list[_JsonObject]) -> tuple[_JsonObject, str]:
    """Returns the answer's message, and "" or the error in place of it.

    Raises:
        ServerUnavailable: there is no proxy.
    """
    body = {"model": model, "messages": messages, "tools": [{"type": "function", "function": _TOOL}]}
    try:
        response = http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            return {}, f"HTTP {response.status_code}: {response.text}"
        message: _JsonObject = response.json()["choices"][0]["message"]
    except httpx.ConnectError as exc:
        raise ServerUnavailable(f"The proxy did not answer ({exc}).") from exc
    except (httpx.HTTPError, ValueError, LookupError) as exc:
        return {}, f"{type(exc).__name__}: {exc}"
    return message, ""


@contextlib.contextmanager
def _proxy(folder: Path, addresses: Sequence[str], key: str) -> Iterator[httpx.Client]:
    config: _JsonObject = {
        "model_list": [
            {
                "model_name": title,
                "litellm_params": {"model": f"lm_studio/{SIMULATED_MODEL}", "api_base": f"{address}/v1"},
                "model_info": {"compaction": {"mode": mode}},
            }
            for title, address, mode in zip(_TITLES, addresses, ("off", "guard"), strict=True)
        ],
        "litellm_settings": {"disable_hf_tokenizer_download": True, "callbacks": [HANDLER]},
        # It shows a compaction with its summary, not one that was written while the picture was drawn.
        "callback_settings": {"litellm_compaction": {"background": "off"}},
    }
    path, log = folder / "config.yaml", folder / "proxy.log"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    port = usable_port("127.0.0.1", 0)
    command = proxy_command(path, "127.0.0.1", port)
    environment = proxy_environment({**os.environ, FOLDER_VARIABLE: str(folder)}, master_key=key, api_base=None)
    base_url, headers = local_url("127.0.0.1", port), {"Authorization": f"Bearer {key}"}
    http = httpx.Client(base_url=base_url, headers=headers, trust_env=False, timeout=_ANSWER_LIMIT_S)
    with log.open("wb") as output, running(command, environment, output=output) as child, http:
        try:
            wait_until_alive(child, base_url)
            yield http
        except CompactionError:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            print("\n".join(lines), file=sys.stderr)
            raise


def _module(turn: int) -> str:
    return _MODULES[turn % len(_MODULES)]


def _sent(record: RequestRecord) -> list[_JsonObject]:
    messages = (record.body or {}).get("messages")
    return messages if isinstance(messages, list) else []


def _say(text: str) -> None:
    shown = text.rstrip()
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(shown.encode(encoding, "replace").decode(encoding), flush=True)
