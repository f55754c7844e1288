"""`litellm-compaction demo`: one long conversation without the plug-in and with it, through a real proxy.

Each side has a small simulated LM Studio in this process: its records show the requests, cuts and computed tokens.
One proxy serves both: for a model group with `mode: off` the plug-in changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import httpx
import yaml

from litellm_compaction.cli.up import (
    SIMULATED_MODEL,
    local_url,
    proxy_command,
    proxy_environment,
    running,
    signals_to,
    simulated,
    usable_port,
    wait_until_alive,
)
from litellm_compaction.core.continuation.request import GO_ON_START
from litellm_compaction.errors import CompactionError, ServerUnavailable
from litellm_compaction.places import FOLDER_VARIABLE
from litellm_compaction.proxy.config_check import HANDLER
from litellm_compaction.simulator import ChatCall, Reply, RequestRecord, serve
from litellm_compaction.simulator.messages import parse_chat
from litellm_compaction.simulator.rendering import render_chat

WIDTH = 98
_BAR_WIDTH, _SIDE_WIDTH = 24, 44
_TITLES = ("without the plug-in", "with the plug-in")
_RESET = "\x1b[0m"
_GREEN, _RED, _BOLD = "\x1b[32m", "\x1b[31m", "\x1b[1m"


class Filling(NamedTuple):
    """One side of a turn: the tokens of prompt and answer, and those of them that the server cut out."""

    used_tokens: int
    lost_tokens: int = 0
    has_failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Draws lines of at most `WIDTH` characters: with colors, blocks and arrows if the terminal shows them."""

    window_tokens: int
    color: bool
    unicode: bool

    def opening(self) -> str:
        return (
            "The same coding agent twice, through one LiteLLM proxy whose plug-in guards only the second. Each\n"
            f"has a simulated LM Studio, with {SIMULATED_MODEL} loaded for {self.window_tokens:,} tokens: a full bar.\n"
            "An agent sends its whole conversation each turn; numbers are the tokens of prompt and answer.\n"
            f"{self._painted(_RED, 'x')}: cut out of the prompt by the server, so the model never saw it.\n\n"
            f"{'':20}{_TITLES[0]:<{_SIDE_WIDTH}}  {_TITLES[1]}"
        )

    def turn(self, turn: int, what: str, without: Filling, with_it: Filling) -> str:
        return f"turn {turn:>3} {what:<9}  {self._side(without)}  {self._side(with_it)}"

    def event(self, name: str, before_tokens: int, after_tokens: int, rest: str = "") -> str:
        arrow, gear = ("→", "⚙") if self.unicode else ("->", "*")
        text = f"{gear} {name}: {before_tokens:,} {arrow} {after_tokens:,} tokens{rest}"
        return self._painted(_BOLD, text.rjust(WIDTH))

    def failure(self, title: str, error: str) -> str:
        return self._painted(_RED, f"{'':20}! {title}: {' '.join(error.split())}"[:WIDTH])

    def _side(self, side: Filling) -> str:
        full, empty = ("█", "░") if self.unicode else ("#", ".")
        filled = min(_BAR_WIDTH, round(side.used_tokens / self.window_tokens * _BAR_WIDTH))
        # A bar with a gap is the whole prompt, so that the gap shows how much of it is lost.
        lost = math.ceil(side.lost_tokens / max(1, side.used_tokens) * filled)
        before = (filled - lost) // 2
        bar = full * before + "x" * lost + full * (filled - lost - before) + empty * (_BAR_WIDTH - filled)
        state = "FAILED" if side.has_failed else f"CUT -{side.lost_tokens:,}" if lost else ""
        return self._painted(_RED if state else _GREEN, f"{bar} {side.used_tokens:>7,} {state}".ljust(_SIDE_WIDTH))

    def _painted(self, color: str, text: str) -> str:
        return f"{color}{text}{_RESET}" if self.color else text


class Answer(NamedTuple):
    """`error` is "" for an answer that ended well."""

    text: str
    calls: list[JsonObject]
    error: str


def ask(http: httpx.Client, key: str, model: str, messages: list[JsonObject]) -> Answer:
    """Returns the answer, or what came of it before an error.

    Raises:
        ServerUnavailable: there is no proxy.
    """
    body = {"model": model, "messages": messages, "tools": list(TOOLS), "stream": True}
    content: list[str] = []
    calls: dict[int, JsonObject] = {}
    error = ""
    headers = {"Authorization": f"Bearer {key}"}
    try:
        with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                error = f"HTTP {response.status_code}: {response.read().decode('utf-8', 'replace')}"
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    error = str(chunk.get("error") or error)
                    _read_chunk(chunk, content, calls)
    except httpx.ConnectError as exc:
        raise ServerUnavailable(f"The proxy did not answer ({exc}).") from exc
    except httpx.HTTPError as exc:
        error = f"{type(exc).__name__}: {exc}"
    return Answer("".join(content), [calls[index] for index in sorted(calls)], error)


def _read_chunk(chunk: JsonObject, content: list[str], calls: dict[int, JsonObject]) -> None:
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        content.append(delta.get("content") or "")
        for piece in delta.get("tool_calls") or ():
            call = calls.setdefault(
                piece.get("index", 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = call["id"] or piece.get("id") or ""
            function = piece.get("function") or {}
            for name in ("name", "arguments"):
                call["function"][name] += function.get(name) or ""


_PAUSE_S = 0.25
_ANSWER_LIMIT_S = 120.0
_LOG_LINES = 15


def demo(*, turns: int, context_tokens: int, fast: bool, color: bool, environ: Mapping[str, str]) -> int:
    """Shows the conversation on both sides; returns 0 if with the plug-in nothing was lost, else 1.

    Args:
        context_tokens: context length with which the simulated models are loaded.

    Raises:
        CompactionError: the proxy does not start, or ends too early.
    """
    look = Look(window_tokens=context_tokens, color=color, unicode=_can_encode("█░→⚙", sys.stdout.encoding))
    sides = without, with_it = [_Side(title, look) for title in _TITLES]
    # SIGTERM ends the block as Ctrl-C does, so that the proxy is ended, too.
    with (
        signals_to(_interrupt, signal.SIGTERM),
        serve(without.simulator) as alone,
        serve(with_it.simulator) as guarded,
        tempfile.TemporaryDirectory() as folder,
    ):
        _say(look.opening())
        key = f"sk-{secrets.token_urlsafe(32)}"
        with _proxy(Path(folder), (alone.base_url, guarded.base_url), key, environ=environ) as base_url:
            try:
                with httpx.Client(base_url=base_url, trust_env=False, timeout=_ANSWER_LIMIT_S) as http:
                    for turn in range(turns + 1):
                        call = step_of(turn).call
                        what = "report" if turn == turns else call[0] if call else "answers"
                        asked = REPORT_REQUEST if turn == turns else None
                        _say(look.turn(turn + 1, what, *(side.play(http, key, turn, asked) for side in sides)))
                        for event in (*without.events, *with_it.events):
                            _say(event)
                        if not fast:
                            time.sleep(_PAUSE_S)
            finally:
                _say("")
                for (label, text), other in zip(without.summary(), with_it.summary(), strict=True):
                    _say(f"{label:<42}{text:>28}{other[1]:>28}")
    return 1 if with_it.losses or not with_it.report_is_whole else 0


class _Side:
    """One client's conversation, the simulated model that answers it, and the numbers of both for the summary.

    Args:
        title: the name of its model group, too.
    """

    def __init__(self, title: str, look: Look) -> None:
        self._title, self._look = title, look
        self._conversation = Conversation(look.window_tokens)
        self._report = report_of(look.window_tokens)
        self._turn = self._compactions = self._restarts = self.losses = 0
        self._reported: str | None = None
        # What came of the newest turn beside its answer.
        self.events: list[str] = []
        self._last_messages: list[JsonObject] = []
        self._last_length = 0
        # Only whole answers are shown: chunks of one token are work that shows nothing.
        self.simulator = simulated(look.window_tokens, script=self._reply, chunk_tokens=8)

    @property
    def report_is_whole(self) -> bool:
        return self._reported == self._report

    def play(self, http: httpx.Client, key: str, turn: int, asked: str | None) -> Filling:
        """Sends the conversation, with `asked` as the user's last words, and adds the answer to it."""
        self._turn, self.events = turn, []
        if asked is not None:
            self._conversation.ask(asked)
        messages, seen = self._conversation.messages, len(self.simulator.inference_requests())
        answer = ask(http, key, self._title, messages)
        records = self.simulator.inference_requests()[seen:]
        self.simulator.wait_until(lambda: all(record.outcome != "running" for record in records))
        self.losses += sum(record.truncated for record in records) or bool(answer.error)
        self._reported = answer.text if asked is not None else None
        # A request for a summary is one message.
        parts = [record for record in records if len(_messages(record)) > 1]
        last, length = self._last_messages, self._last_length
        if answer.error or not parts:
            self.events.append(self._look.failure(self._title, answer.error or "the server was not asked"))
            self._conversation.add_answer(turn, "(no answer)", [])
            return Filling(parts[0].prompt_tokens if parts else 0, has_failed=True)
        self._last_messages, self._last_length = _messages(parts[-1]), len(messages)
        # A prompt that does not begin with the one of the turn before was compacted.
        if _messages(parts[0])[: len(last)] != last:
            self._compactions += 1
            calls = records.index(parts[0])
            made = f" ({calls} summary call{'s' if calls > 1 else ''})" if calls else " (without a model call)"
            before_tokens = _count([*last, *messages[length:]])
            name = f"compaction {self._compactions}"
            self.events.append(self._look.event(name, before_tokens, parts[0].prompt_tokens, made))
        for before, part in pairwise(parts):
            self._restarts += 1
            used_tokens = before.prompt_tokens + before.completion_tokens
            name = f"restart {self._restarts} in mid-answer"
            self.events.append(self._look.event(name, used_tokens, part.prompt_tokens))
        self._conversation.add_answer(turn, answer.text, answer.calls)
        sent = parts[0]
        lost_tokens = sent.prompt_tokens - sent.kept_tokens if sent.truncated else 0
        return Filling(sent.prompt_tokens + sent.completion_tokens, lost_tokens)

    def summary(self) -> tuple[tuple[str, str], ...]:
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

    def _reply(self, call: ChatCall) -> Reply:
        """Called in the simulator's thread; the conversation does not change while a request is open."""
        newest = call.messages[-1] if call.messages else {}
        said = newest.get("content")
        if newest.get("role") == "assistant":
            # The server lets the model go on inside its own message.
            return Reply(rest_of(self._report, str(said)))
        if str(said).startswith(GO_ON_START):
            return Reply(rest_of(self._report, str(call.messages[-2].get("content"))))
        # A summary may stand before the user's own words.
        if not isinstance(said, str) or not said.endswith(self._conversation.messages[-1]["content"]):
            return Reply(scripted_summary(call.prompt_text))
        if said.endswith(REPORT_REQUEST):
            return Reply(self._report)
        step = step_of(self._turn)
        if step.call is None:
            return Reply(step.text)
        name, arguments = step.call
        return Reply(step.text, tool_calls=((name, json.dumps(arguments, ensure_ascii=False)),))


@contextlib.contextmanager
def _proxy(folder: Path, addresses: Sequence[str], key: str, *, environ: Mapping[str, str]) -> Iterator[str]:
    config: JsonObject = {
        "model_list": [
            {
                "model_name": title,
                "litellm_params": {"model": f"lm_studio/{SIMULATED_MODEL}", "api_base": f"{address}/v1"},
                "model_info": {"compaction": {"mode": mode}},
            }
            for title, address, mode in zip(_TITLES, addresses, ("off", "guard"), strict=True)
        ],
        "litellm_settings": {"disable_hf_tokenizer_download": True, "callbacks": [HANDLER]},
        "general_settings": {"cancel_on_disconnect": True},
        # It shows a compaction with its summary, not one that was written while the picture was drawn.
        "callback_settings": {"litellm_compaction": {"background": "off"}},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    port = usable_port("127.0.0.1", 0)
    command = proxy_command(path, "127.0.0.1", port)
    environment = proxy_environment({**environ, FOLDER_VARIABLE: str(folder)}, master_key=key, api_base=None)
    log = folder / "proxy.log"
    with log.open("wb") as output, running("proxy", command, environment, output=output) as child:
        base_url = local_url("127.0.0.1", port)
        try:
            wait_until_alive(child, base_url)
            yield base_url
        except CompactionError:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            print("\n".join(lines), file=sys.stderr)
            raise


def _messages(record: RequestRecord) -> list[JsonObject]:
    messages = (record.body or {}).get("messages")
    return messages if isinstance(messages, list) else []


def _count(messages: list[JsonObject]) -> int:
    request = parse_chat({"messages": messages, "tools": list(TOOLS)})
    return render_chat(request.messages, request.tools).count_tokens()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _can_encode(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _say(text: str) -> None:
    print(text.rstrip(), flush=True)


JsonObject: TypeAlias = dict[str, Any]

SYSTEM = (
    "You are a coding agent in the repository `ledger`. Work in small steps: read what you need, change it, run the "
    "tests, and report. Never edit files under migrations/. Amounts are integers in cents. Answer in English."
)
TASK = (
    "Find out why monthly statements are one cent off for accounts with more than 1,000 bookings, and fix it. "
    "The reference value for account DE-4471 is 128,903.17. Do not change the public API of ledger/totals.py."
)
TOOLS: tuple[JsonObject, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, description, argument in (
        ("read_file", "Read a text file of the repository.", "path"),
        ("run_tests", "Run the tests that match an expression; returns pytest's output.", "expression"),
        ("search", "Search the repository with a regular expression.", "pattern"),
    )
)
_REMARKS = (
    "Good. Go on with the next module, and keep an eye on how it rounds.",
    "Please also check whether the import job uses the same rounding.",
    "That fits what I saw: the report of 2026-03 was off by exactly 0.01. Continue.",
    "Do not touch the exporter yet; first make sure that the totals are right.",
    "Looks right. What about bookings with a negative amount?",
    "Thanks. Add that to the list of findings and look at the next file.",
)
_MODULES = ("totals", "rounding", "statement", "imports", "export", "booking", "account", "currency", "report", "audit")
_NOUNS = ("amount", "balance", "booking", "entry", "total", "cents", "rate", "period", "account", "delta", "carry")
_TEST_RESULTS = "tests/test_{module}.py::test_{noun}_{number} PASSED"
_PATH = re.compile(r"ledger/\w+\.py")
_STEPS = 4
REPORT_REQUEST = "Now write the whole report: one line for each check that you made, in order."
# A line of the report takes about 25 tokens: all of it is a little longer than the window.
_WINDOW_TOKENS_PER_REPORT_LINE = 22
# More than a line: it holds a number, so it stands only once in the report.
_SEAM_CHARS = 160
_BASE_WINDOW_TOKENS = 8192


class Step(NamedTuple):
    """One turn of the model: text, or a call (name, arguments) with a few words before it."""

    text: str
    call: tuple[str, JsonObject] | None


def step_of(turn: int) -> Step:
    module = _module(turn)
    path = f"ledger/{module}.py"
    kind = turn % _STEPS
    if kind == 0:
        return Step(f"I read `{path}` first.", ("read_file", {"path": path}))
    if kind == 1:
        return Step("", ("search", {"pattern": f"def .*{_noun(turn)}"}))
    if kind == 2:
        return Step("Now the tests that cover it.", ("run_tests", {"expression": module}))
    return Step(
        f"`{path}` adds {_noun(turn)} values as floats in line {37 + turn} and rounds once at the end; with more than "
        f"1,000 bookings the error reaches a cent. I changed it to integer cents, round half to even, and kept the "
        f"signature. The tests of {module} pass ({11 + turn % 7} passed). Account DE-4471 now gives 128,903.17. "
        "Next I look at the callers.",
        None,
    )


class Conversation:
    """The client's side: the whole history, resent with every request, as clients do.

    Args:
        context_tokens: window of the demo; tool results grow with it.
    """

    def __init__(self, context_tokens: int) -> None:
        self.messages: list[JsonObject] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": TASK},
        ]
        self._lines = max(12, round(34 * context_tokens / _BASE_WINDOW_TOKENS))

    def add_answer(self, turn: int, content: str, calls: Sequence[JsonObject]) -> None:
        """Appends the model's words in `turn`, and the sequel: tool results, or the user's next remark."""
        answer: JsonObject = {"role": "assistant", "content": content}
        if calls:
            answer["tool_calls"] = list(calls)
        self.messages.append(answer)
        self.messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": self._tool_result(turn)} for call in calls
        ]
        if not calls:
            self.messages.append({"role": "user", "content": _REMARKS[turn // _STEPS % len(_REMARKS)]})

    def ask(self, text: str) -> None:
        if self.messages[-1]["role"] == "user":
            self.messages += [{"role": "assistant", "content": "Noted."}]
        elif self.messages[-1]["role"] == "tool":
            self.messages += [{"role": "assistant", "content": "I have seen enough."}]
        self.messages.append({"role": "user", "content": text})

    def _tool_result(self, turn: int) -> str:
        chooser = random.Random(turn)  # noqa: S311 - the same text in every run
        module, kind = _module(turn), turn % _STEPS
        if kind == 0:
            return "\n".join(_code_line(chooser, number) for number in range(1, 2 * self._lines))
        if kind == 1:
            return "\n".join(
                f"ledger/{chooser.choice(_MODULES)}.py:{chooser.randrange(10, 400)}: def "
                f"{chooser.choice(_NOUNS)}_of_{chooser.choice(_NOUNS)}(self, {chooser.choice(_NOUNS)}: int) -> int:"
                for _ in range(self._lines // 2)
            )
        passed = [
            _TEST_RESULTS.format(module=module, noun=chooser.choice(_NOUNS), number=number)
            for number in range(1, self._lines // 2)
        ]
        return "\n".join([*passed, f"{len(passed)} passed in {chooser.randrange(20, 400) / 100:.2f}s"])


def report_of(context_tokens: int) -> str:
    """An answer that is longer than the window: numbered lines, so that a lost or doubled one shows."""
    return "\n".join(
        f"{number}. ledger/{_MODULES[number % len(_MODULES)]}.py, line {37 + number}: {_noun(number)} is kept in "
        "integer cents and agrees with the reference."
        for number in range(1, context_tokens // _WINDOW_TOKENS_PER_REPORT_LINE)
    )


def rest_of(report: str, shown: str) -> str:
    """The rest to write, for a model that sees the end of its text so far."""
    end = shown[-_SEAM_CHARS:]
    _, found, rest = report.partition(end)
    return rest if end and found else report


def scripted_summary(prompt_text: str) -> str:
    """The simulated model's summary: the facts that it finds in its prompt."""
    paths = list(dict.fromkeys(_PATH.findall(prompt_text)))[:12]
    rows = "\n".join(f"| {path} | read, integer cents | tests pass |" for path in paths) or "| - | - | - |"
    return (
        "### Original task\nMonthly statements are one cent off for accounts with more than 1,000 bookings; "
        "reference DE-4471 = 128,903.17; the public API of ledger/totals.py must not change.\n"
        f"### Completed work\n| File or component | Action | Result |\n|---|---|---|\n{rows}\n"
        "### Key decisions\nInteger cents, round half to even, because float sums drift.\n"
        "### Current state\nThe files above are done.\n### Pending\n- [ ] check the remaining callers"
    )


def _module(turn: int) -> str:
    return _MODULES[turn // _STEPS % len(_MODULES)]


def _noun(turn: int) -> str:
    return _NOUNS[turn * 7 % len(_NOUNS)]


def _code_line(chooser: random.Random, number: int) -> str:
    left, right, name = (chooser.choice(_NOUNS) for _ in range(3))
    if number % 9 == 1:
        return f"\ndef {name}_{number}({left}: int, {right}: int) -> int:"
    return f"    {name} = {left} + {right} * {chooser.randrange(2, 99)}  # {chooser.choice(_NOUNS)} {number}"
