"""`litellm-compaction demo`: a long conversation through a real proxy, with a small simulated LM Studio behind it.

The simulator runs in this process, because it is the witness: its records say what was really sent, cut and computed.
The client sends streamed chat completions over plain HTTP, as any OpenAI client does. Shown is one line a turn with a
bar, one a compaction, and one summary.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import httpx
import yaml

from litellm_compaction.cli.children import (
    local_url,
    proxy_command,
    proxy_environment,
    running,
    signals_to,
    usable_port,
    wait_until_alive,
)
from litellm_compaction.cli.demo_conversation import (
    REPORT_REQUEST,
    TOOLS,
    Conversation,
    JsonObject,
    report_of,
    rest_of,
    scripted_summary,
    step_of,
)
from litellm_compaction.config import settings_from
from litellm_compaction.core.continuation.request import GO_ON_START
from litellm_compaction.core.messages import START_NOTICE
from litellm_compaction.errors import CompactionError, ServerUnavailable
from litellm_compaction.paths import FOLDER_VARIABLE
from litellm_compaction.proxy.config_check import HANDLER
from litellm_compaction.simulator import ChatCall, Model, Reply, RequestRecord, Simulator, serve
from litellm_compaction.simulator.messages import parse_chat
from litellm_compaction.simulator.rendering import render_chat

WIDTH = 40
_RESET = "\x1b[0m"
_GREEN, _YELLOW, _RED, _BOLD, _DIM = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[2m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How lines are drawn.

    Attributes:
        trigger_ratio: where the bar is marked.
        unicode: whether the terminal can show blocks and arrows.
    """

    trigger_ratio: float
    color: bool
    unicode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """One compaction as the demo saw it; `announced` says whether the stream carried the notice."""

    round: int
    before_tokens: int
    after_tokens: int
    summary_calls: int
    announced: bool


def turn_line(look: Look, turn: int, used_tokens: int, window_tokens: int, what: str) -> str:
    ratio = used_tokens / window_tokens
    color = _RED if ratio > 0.95 else _YELLOW if ratio > look.trigger_ratio else _GREEN
    numbers = f"{used_tokens:>7,}/{window_tokens:,}"
    return f"turn {turn:>3}  {_painted(look, color, _bar(look, ratio))} {numbers} {ratio:>5.0%}  {what}"


def compaction_line(look: Look, compacted: Compacted) -> str:
    arrow, gear = ("→", "⚙") if look.unicode else ("->", "*")
    how = "without a model call"
    if compacted.summary_calls:
        how = f"{compacted.summary_calls} summary call{'s' if compacted.summary_calls > 1 else ''}"
    told = ", announced in the stream" if compacted.announced else ""
    text = (
        f"{gear} round {compacted.round}: {compacted.before_tokens:,} {arrow} {compacted.after_tokens:,} tokens "
        f"({how}{told})"
    )
    return f"          {_painted(look, _BOLD, text)}"


def restart_line(look: Look, number: int, used_tokens: int, prompt_tokens: int) -> str:
    arrow, gear = ("→", "⚙") if look.unicode else ("->", "*")
    text = f"{gear} restart {number} in mid-answer: {used_tokens:,} {arrow} {prompt_tokens:,} tokens"
    return f"          {_painted(look, _BOLD, text)}"


def truncation_line(look: Look, sent_tokens: int, kept_tokens: int) -> str:
    text = f"! the server cut the prompt: {sent_tokens:,} tokens were sent, {kept_tokens:,} were seen"
    return f"          {_painted(look, _RED, text)}"


def legend(look: Look, window_tokens: int) -> str:
    mark = "│" if look.unicode else "|"
    trigger_tokens = round(look.trigger_ratio * window_tokens)
    text = f"{mark} marks {look.trigger_ratio:.0%} of the window ({trigger_tokens:,} tokens): "
    text += "prompt + room for the answer stay below it, or are compacted"
    return _painted(look, _DIM, text)


def _bar(look: Look, ratio: float) -> str:
    full, empty, mark = ("█", "░", "│") if look.unicode else ("#", ".", "|")
    filled = min(WIDTH, round(ratio * WIDTH))
    trigger = round(look.trigger_ratio * WIDTH)
    cells = full * filled + empty * (WIDTH - filled)
    return f"{cells[:trigger]}{mark}{cells[trigger:]}"


def _painted(look: Look, color: str, text: str) -> str:
    return f"{color}{text}{_RESET}" if look.color else text


class Answer(NamedTuple):
    """One streamed answer; the proxy tells programs of a compaction in `thoughts`, before the answer begins."""

    text: str
    calls: list[JsonObject]
    thoughts: str


def ask(http: httpx.Client, key: str, model: str, messages: list[JsonObject]) -> Answer:
    """One streamed answer.

    Raises:
        CompactionError: the proxy refused, or the stream ended with an error.
    """
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


@dataclass(slots=True)
class _Tally:
    """What the summary line says; filled while the demo runs."""

    turns: int = 0
    compactions: int = 0
    truncated: int = 0
    report_is_whole: bool = True
    last_body: JsonObject = field(default_factory=dict)


def demo(*, turns: int, context_tokens: int, fast: bool, color: bool, guarded: bool, environ: Mapping[str, str]) -> int:
    """Shows the conversation; 0 when nothing was cut by the server, else 1.

    Args:
        turns: requests of the conversation.
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
    conversation = Conversation(context_tokens)
    stage = _Stage(conversation, report_of(context_tokens))
    # Only whole answers are shown: what the proxy would do for each token is time in which nobody sees anything.
    simulator = Simulator([Model(MODEL)], script=stage.reply, chunk_tokens=8)
    simulator.load(MODEL, context_tokens)
    # SIGTERM ends the block as Ctrl-C does, so that the proxy is ended, too.
    with signals_to(_interrupt, signal.SIGTERM), serve(simulator) as address, tempfile.TemporaryDirectory() as folder:
        plugin = "with the plug-in" if guarded else "WITHOUT the plug-in"
        _say(f"Simulated LM Studio with {MODEL}, {context_tokens:,} tokens; a stock LiteLLM proxy {plugin} before it.")
        key = f"sk-{secrets.token_urlsafe(32)}"
        with _proxy(Path(folder), f"{address.base_url}/v1", key, guarded=guarded, environ=environ) as base_url:
            _say(legend(look, context_tokens))
            tally = _Tally()
            try:
                with httpx.Client(base_url=base_url, trust_env=False, timeout=_ANSWER_LIMIT_S) as http:
                    for turn in range(turns):
                        stage.turn = turn
                        _play(http, key, simulator, conversation, turn, look, tally)
                        if not fast:
                            time.sleep(_PAUSE_S)
                    _finale(http, key, simulator, stage, look, tally)
            finally:
                _say(_summary(tally, simulator, conversation))
    return 1 if tally.truncated or not tally.report_is_whole else 0


class _Stage:
    """The simulated model: the script's answer to the conversation, a summary to anything else.

    Args:
        conversation: whose last message is being answered.
        report: what it answers at the end, over as many requests as it is given.
    """

    def __init__(self, conversation: Conversation, report: str) -> None:
        self.turn = 0
        self.conversation = conversation
        self.report = report

    def reply(self, call: ChatCall) -> Reply:
        """Called in the simulator's thread; the conversation does not change while a request is open."""
        newest = call.messages[-1] if call.messages else {}
        if newest.get("role") == "assistant":
            # The server lets the model go on inside its own message.
            return Reply(rest_of(self.report, str(newest.get("content"))))
        if str(newest.get("content")).startswith(GO_ON_START):
            return Reply(rest_of(self.report, str(call.messages[-2].get("content"))))
        # A summary may stand before the user's own words.
        said = newest.get("content")
        if not isinstance(said, str) or not said.endswith(self.conversation.messages[-1]["content"]):
            return Reply(scripted_summary(call.prompt_text))
        if said.endswith(REPORT_REQUEST):
            return Reply(self.report)
        step = step_of(self.turn)
        if step.call is None:
            return Reply(step.text)
        name, arguments = step.call
        return Reply(step.text, tool_calls=((name, json.dumps(arguments, ensure_ascii=False)),))


def _play(
    http: httpx.Client,
    key: str,
    simulator: Simulator,
    conversation: Conversation,
    turn: int,
    look: Look,
    tally: _Tally,
) -> None:
    seen = len(simulator.inference_requests())
    content, calls, thoughts = ask(http, key, f"lm_studio/{MODEL}", conversation.messages)
    records = simulator.inference_requests()[seen:]
    if not records:
        raise ServerUnavailable("The proxy answered without asking the simulator.")
    simulator.wait_until(lambda: all(record.outcome != "running" for record in records))
    sent = records[-1]
    compacted = _compacted(tally, conversation, records, announced=START_NOTICE in thoughts)
    if compacted is not None:
        tally.compactions = compacted.round
        _say(compaction_line(look, compacted))
    for record in records:
        if record.truncated:
            tally.truncated += 1
            _say(truncation_line(look, record.prompt_tokens, record.kept_tokens))
    tally.turns += 1
    tally.last_body = {"tools": list(TOOLS), "messages": _messages(sent), "length": len(conversation.messages)}
    step = step_of(turn)
    what = " ".join((step.call[0], *step.call[1].values())) if step.call else "answers the user"
    _say(turn_line(look, turn + 1, sent.prompt_tokens + sent.completion_tokens, sent.context_length, what))
    conversation.add_answer(turn, content, calls)


def _finale(http: httpx.Client, key: str, simulator: Simulator, stage: _Stage, look: Look, tally: _Tally) -> None:
    stage.conversation.ask(REPORT_REQUEST)
    seen = len(simulator.inference_requests())
    content = ask(http, key, f"lm_studio/{MODEL}", stage.conversation.messages).text
    records = simulator.inference_requests()[seen:]
    simulator.wait_until(lambda: all(record.outcome != "running" for record in records))
    parts = [record for record in records if len(_messages(record)) > 1]
    for number, part in enumerate(parts):
        if number:
            used = parts[number - 1].prompt_tokens + parts[number - 1].completion_tokens
            _say(restart_line(look, number, used, part.prompt_tokens))
        _say(
            turn_line(look, tally.turns + 1, part.prompt_tokens + part.completion_tokens, part.context_length, "report")
        )
    tally.turns += 1
    tally.truncated += sum(record.truncated for record in records)
    lines = stage.report.splitlines()
    tally.report_is_whole = content == stage.report
    whole = "each once" if tally.report_is_whole else "NOT whole"
    _say(f"          the report has {len(lines)} lines; the client has them in one answer: {whole}")


def _compacted(
    tally: _Tally, conversation: Conversation, records: list[RequestRecord], *, announced: bool
) -> Compacted | None:
    """The compaction of this turn: what was sent no longer begins with what was sent in the turn before."""
    before = tally.last_body
    now = _messages(records[-1])
    if not before or now[: len(before["messages"])] == before["messages"]:
        return None
    grown = [*before["messages"], *conversation.messages[before["length"] :]]
    return Compacted(
        round=tally.compactions + 1,
        before_tokens=_count({"messages": grown, "tools": before["tools"]}),
        after_tokens=records[-1].prompt_tokens,
        summary_calls=len(records) - 1,
        announced=announced,
    )


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


def _summary(tally: _Tally, simulator: Simulator, conversation: Conversation) -> str:
    records = simulator.inference_requests()
    computed = sum(record.computed_tokens for record in records)
    cached = sum(record.cached_tokens for record in records)
    whole = _count({"messages": conversation.messages, "tools": list(TOOLS)})
    share = cached / max(1, computed + cached)
    return (
        f"\n{tally.turns} turns, {tally.compactions} compactions, {tally.truncated} truncations by the server. "
        f"The client's conversation has {whole:,} tokens.\n"
        f"Engine work: {computed:,} prompt tokens computed, {cached:,} taken from its cache ({share:.0%})."
    )


def _messages(record: RequestRecord) -> list[JsonObject]:
    messages = (record.body or {}).get("messages")
    return messages if isinstance(messages, list) else []


def _count(body: JsonObject) -> int:
    request = parse_chat(body)
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
