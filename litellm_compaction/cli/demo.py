"""`litellm-compaction demo`: a long conversation through a real proxy, in front of a small simulated LM Studio.

The simulator runs in this process: its records show the requests, cuts and computed tokens.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import httpx
import yaml

from litellm_compaction.cli.up import (
    local_url,
    proxy_command,
    proxy_environment,
    running,
    signals_to,
    usable_port,
    wait_until_alive,
)
from litellm_compaction.config import settings_from
from litellm_compaction.core.continuation.request import GO_ON_START
from litellm_compaction.core.messages import START_NOTICE
from litellm_compaction.errors import CompactionError, ServerUnavailable
from litellm_compaction.places import FOLDER_VARIABLE
from litellm_compaction.proxy.config_check import HANDLER
from litellm_compaction.simulator import ChatCall, Model, Reply, RequestRecord, Simulator, serve
from litellm_compaction.simulator.messages import parse_chat
from litellm_compaction.simulator.rendering import render_chat

WIDTH = 40
_RESET = "\x1b[0m"
_GREEN, _YELLOW, _RED, _BOLD, _DIM = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[2m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Draws lines: with the bar marked here, and colors, blocks and arrows if the terminal shows them."""

    trigger_ratio: float
    color: bool
    unicode: bool

    def turn(self, turn: int, used_tokens: int, window_tokens: int, what: str) -> str:
        ratio = used_tokens / window_tokens
        color = _RED if ratio > 0.95 else _YELLOW if ratio > self.trigger_ratio else _GREEN
        numbers = f"{used_tokens:>7,}/{window_tokens:,}"
        return f"turn {turn:>3}  {self._painted(color, self._bar(ratio))} {numbers} {ratio:>5.0%}  {what}"

    def compaction(self, number: int, before_tokens: int, after_tokens: int, calls: int, *, is_announced: bool) -> str:
        how = f"{calls} summary call{'s' if calls > 1 else ''}" if calls else "without a model call"
        told = ", announced in the stream" if is_announced else ""
        return self._event(f"round {number}", before_tokens, after_tokens, f" ({how}{told})")

    def restart(self, number: int, used_tokens: int, prompt_tokens: int) -> str:
        return self._event(f"restart {number} in mid-answer", used_tokens, prompt_tokens)

    def truncation(self, sent_tokens: int, kept_tokens: int) -> str:
        text = f"! the server cut the prompt: {sent_tokens:,} tokens were sent, {kept_tokens:,} were seen"
        return f"          {self._painted(_RED, text)}"

    def legend(self, window_tokens: int) -> str:
        mark = "│" if self.unicode else "|"
        trigger = f"{self.trigger_ratio:.0%} of the window ({round(self.trigger_ratio * window_tokens):,} tokens)"
        return self._painted(
            _DIM, f"{mark} marks {trigger}: prompt + room for the answer stay below it, or are compacted"
        )

    def _event(self, name: str, before_tokens: int, after_tokens: int, rest: str = "") -> str:
        arrow, gear = ("→", "⚙") if self.unicode else ("->", "*")
        text = f"{gear} {name}: {before_tokens:,} {arrow} {after_tokens:,} tokens{rest}"
        return f"          {self._painted(_BOLD, text)}"

    def _bar(self, ratio: float) -> str:
        full, empty, mark = ("█", "░", "│") if self.unicode else ("#", ".", "|")
        filled = min(WIDTH, round(ratio * WIDTH))
        trigger = round(self.trigger_ratio * WIDTH)
        cells = full * filled + empty * (WIDTH - filled)
        return f"{cells[:trigger]}{mark}{cells[trigger:]}"

    def _painted(self, color: str, text: str) -> str:
        return f"{color}{text}{_RESET}" if self.color else text


class Answer(NamedTuple):
    """The proxy tells programs of a compaction in `thoughts`."""

    text: str
    calls: list[JsonObject]
    thoughts: str


def ask(http: httpx.Client, key: str, model: str, messages: list[JsonObject]) -> Answer:
    body = {"model": model, "messages": messages, "tools": list(TOOLS), "stream": True}
    content: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, JsonObject] = {}
    headers = {"Authorization": f"Bearer {key}"}
    try:
        with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                raise CompactionError(f"HTTP {response.status_code}: {response.read().decode('utf-8', 'replace')}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    _read_chunk(json.loads(line.removeprefix("data: ")), content, thoughts, calls)
    except httpx.HTTPError as exc:
        raise ServerUnavailable(f"The proxy did not answer ({type(exc).__name__}: {exc}).") from exc
    return Answer("".join(content), [calls[index] for index in sorted(calls)], "".join(thoughts))


def _read_chunk(chunk: JsonObject, content: list[str], thoughts: list[str], calls: dict[int, JsonObject]) -> None:
    if "error" in chunk:
        raise CompactionError(f"The stream ended with an error: {chunk['error']}")
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        content.append(delta.get("content") or "")
        thoughts.append(delta.get("reasoning_content") or "")
        for piece in delta.get("tool_calls") or ():
            call = calls.setdefault(
                piece.get("index", 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = call["id"] or piece.get("id") or ""
            function = piece.get("function") or {}
            for name in ("name", "arguments"):
                call["function"][name] += function.get(name) or ""


MODEL = "qwen/qwen3-8b"
_PAUSE_S = 0.25
_ANSWER_LIMIT_S = 120.0
_LOG_LINES = 15


def demo(*, turns: int, context_tokens: int, fast: bool, color: bool, guarded: bool, environ: Mapping[str, str]) -> int:
    """Shows the conversation; returns 0 if nothing was cut by the server, else 1.

    Args:
        context_tokens: context length with which the simulated model is loaded.
        guarded: False leaves the plug-in out, for comparison.

    Raises:
        CompactionError: the proxy does not start or refuses a request.
    """
    look = Look(
        trigger_ratio=settings_from(None).pre_request_ratio,
        color=color,
        unicode=_can_encode("█░│→⚙", sys.stdout.encoding),
    )
    stage = _Stage(look, context_tokens)
    # SIGTERM ends the block as Ctrl-C does, so that the proxy is ended, too.
    with (
        signals_to(_interrupt, signal.SIGTERM),
        serve(stage.simulator) as address,
        tempfile.TemporaryDirectory() as folder,
    ):
        plugin = "with the plug-in" if guarded else "WITHOUT the plug-in"
        _say(f"Simulated LM Studio with {MODEL}, {context_tokens:,} tokens; a stock LiteLLM proxy {plugin} before it.")
        key = f"sk-{secrets.token_urlsafe(32)}"
        with _proxy(Path(folder), f"{address.base_url}/v1", key, guarded=guarded, environ=environ) as base_url:
            _say(look.legend(context_tokens))
            try:
                with httpx.Client(base_url=base_url, trust_env=False, timeout=_ANSWER_LIMIT_S) as http:
                    for _ in range(turns):
                        stage.play(http, key)
                        if not fast:
                            time.sleep(_PAUSE_S)
                    stage.finish(http, key)
            finally:
                _say(stage.summary())
    return 1 if stage.truncated or not stage.report_is_whole else 0


class _Stage:
    """The conversation, the simulated model that answers it, and the numbers of both for the summary line."""

    def __init__(self, look: Look, context_tokens: int) -> None:
        self._look = look
        self._conversation = Conversation(context_tokens)
        self._report = report_of(context_tokens)
        self._turns = self._compactions = self.truncated = 0
        self.report_is_whole = True
        self._last_messages: list[JsonObject] = []
        self._last_length = 0
        # Only whole answers are shown: chunks of one token are work that shows nothing.
        self.simulator = Simulator([Model(MODEL)], script=self._reply, chunk_tokens=8)
        self.simulator.load(MODEL, context_tokens)

    def play(self, http: httpx.Client, key: str) -> None:
        answer, records = self._ask(http, key)
        self._show_compaction(records, is_announced=START_NOTICE in answer.thoughts)
        for record in records:
            if record.truncated:
                _say(self._look.truncation(record.prompt_tokens, record.kept_tokens))
        self._last_messages, self._last_length = _messages(records[-1]), len(self._conversation.messages)
        step = step_of(self._turns)
        self._show_turn(
            records[-1], " ".join((step.call[0], *step.call[1].values())) if step.call else "answers the user"
        )
        self._conversation.add_answer(self._turns, answer.text, answer.calls)
        self._turns += 1

    def finish(self, http: httpx.Client, key: str) -> None:
        """The report: an answer that is longer than the window."""
        self._conversation.ask(REPORT_REQUEST)
        answer, records = self._ask(http, key)
        parts = [record for record in records if len(_messages(record)) > 1]
        for number, part in enumerate(parts):
            if number:
                before = parts[number - 1]
                used_tokens = before.prompt_tokens + before.completion_tokens
                _say(self._look.restart(number, used_tokens, part.prompt_tokens))
            self._show_turn(part, "report")
        self._turns += 1
        self.report_is_whole = answer.text == self._report
        whole = "each once" if self.report_is_whole else "NOT whole"
        lines = len(self._report.splitlines())
        _say(f"          the report has {lines} lines; the client has them in one answer: {whole}")

    def summary(self) -> str:
        records = self.simulator.inference_requests()
        computed = sum(record.computed_tokens for record in records)
        cached = sum(record.cached_tokens for record in records)
        share = cached / max(1, computed + cached)
        return (
            f"\n{self._turns} turns, {self._compactions} compactions, {self.truncated} truncations by the server. "
            f"The client's conversation has {_count(self._conversation.messages):,} tokens.\n"
            f"Engine work: {computed:,} prompt tokens computed, {cached:,} taken from its cache ({share:.0%})."
        )

    def _ask(self, http: httpx.Client, key: str) -> tuple[Answer, list[RequestRecord]]:
        seen = len(self.simulator.inference_requests())
        answer = ask(http, key, f"lm_studio/{MODEL}", self._conversation.messages)
        records = self.simulator.inference_requests()[seen:]
        if not records:
            raise ServerUnavailable("The proxy answered without asking the simulator.")
        self.simulator.wait_until(lambda: all(record.outcome != "running" for record in records))
        self.truncated += sum(record.truncated for record in records)
        return answer, records

    def _show_turn(self, record: RequestRecord, what: str) -> None:
        used_tokens = record.prompt_tokens + record.completion_tokens
        _say(self._look.turn(self._turns + 1, used_tokens, record.context_length, what))

    def _show_compaction(self, records: list[RequestRecord], *, is_announced: bool) -> None:
        """A prompt that does not begin with the one of the turn before was compacted."""
        before, sent = self._last_messages, records[-1]
        if not before or _messages(sent)[: len(before)] == before:
            return
        self._compactions += 1
        before_tokens = _count([*before, *self._conversation.messages[self._last_length :]])
        calls = len(records) - 1
        _say(
            self._look.compaction(
                self._compactions, before_tokens, sent.prompt_tokens, calls, is_announced=is_announced
            )
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
        step = step_of(self._turns)
        if step.call is None:
            return Reply(step.text)
        name, arguments = step.call
        return Reply(step.text, tool_calls=((name, json.dumps(arguments, ensure_ascii=False)),))


@contextlib.contextmanager
def _proxy(folder: Path, api_base: str, key: str, *, guarded: bool, environ: Mapping[str, str]) -> Iterator[str]:
    config: JsonObject = {
        "model_list": [{"model_name": "lm_studio/*", "litellm_params": {"model": "lm_studio/*", "api_base": api_base}}],
        "litellm_settings": {"disable_hf_tokenizer_download": True, **({"callbacks": [HANDLER]} if guarded else {})},
        "general_settings": {"cancel_on_disconnect": True},
        # It shows a compaction with its summary, not one that was written while the picture was drawn.
        "callback_settings": {"litellm_compaction": {"background": "off"}},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    port = usable_port("127.0.0.1", 0)
    command = proxy_command(path, "127.0.0.1", port)
    environment = proxy_environment({**environ, FOLDER_VARIABLE: str(folder)}, master_key=key, api_base=api_base)
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
    print(text, flush=True)


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
