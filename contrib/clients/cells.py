"""Runs a client in a scenario, and judges the run by what reached the server, what was written, and how it ended.

`Matrix` holds one proxy, as config.yaml ships it, in front of one simulator for each client; beside each a second one
without a plug-in and with a window that nothing fills, which tells a client's own faults from ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from contrib.clients.install import NotInstalled, install, search_path
from contrib.clients.model import CONTENT, DONE, OWN_SUMMARY, TARGET, Model, Name
from contrib.clients.table import Client, driver_of
from litellm_compaction.cli.connect import Place, filled, windows_at
from tests.builders import prose
from tests.integration.bench import Bench, Group, Watch, open_bench, overrun
from tests.integration.harness import MASTER_KEY

# docs/clients.md says what each of them is.
SCENARIOS: tuple[Name, ...] = ("task", "results", "long", "unfit", "cancel", "own")
State = Literal["green", "red", "own fault", "not applicable", "not installed"]
_PLAIN_WINDOW = 131_072
_LIMIT_S = 600
_CANCEL_LIMIT_S = 15
# A client may try a refused request again, or shrink it by itself and come back; it may not go on for ever.
_MOST_TRIES = 6
_SHOWN_CHARS = 400


class _Plain(Group):
    """A group without a plug-in; it lists its window, as `connect` wants to know it."""

    def entry(self, base_url: str) -> dict[str, Any]:
        entry = super().entry(base_url)
        entry["model_info"]["max_input_tokens"] = self.window
        return entry


@dataclass(frozen=True)
class Cell:
    """The verdict on one client in one scenario.

    Attributes:
        why: what was wrong, with the tokens of each prompt and answer at the server; "" for a green one.
    """

    state: State
    why: str = ""


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its exit code, None if it had to be killed, and what it has printed."""

    code: int | None
    out: str
    err: str

    @property
    def last_words(self) -> str:
        return " ".join(f"{self.out}\n{self.err}".split())[-_SHOWN_CHARS:]


class Matrix:
    """A proxy for all clients, and the folder that they are installed in."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self._bench = bench
        self._folder = folder

    def cell(self, client: Client, scenario: Name) -> Cell:
        """Runs one client in one scenario; a red cell is tried again without the plug-in before it is called red."""
        if reason := client.without.get(scenario):
            return Cell("not applicable", reason)
        try:
            home = install(client.home, client.packages, self._folder)
        except NotInstalled as error:
            return Cell("not installed", str(error))
        found, requests = self._run(client, scenario, home, client.name)
        state: State = "red" if found else "green"
        if found:
            found.append(f"tokens: {requests}")
        if found and scenario != "unfit":
            without, _ = self._run(client, scenario, home, f"{client.name}-off")
            if without:
                state, found = "own fault", [*found, f"without the plug-in: {'; '.join(without)}"]
        return Cell(state, "; ".join(found)[:1200])

    def _run(self, client: Client, scenario: Name, home: Path, group: str) -> tuple[list[str], str]:
        guarded = group == client.name
        log_since = len(self._bench.proxy.lines)

        def compactions() -> int:
            # Without a plug-in as many are taken for made as it takes with one.
            return len(_compactions(self._bench.proxy.lines[log_since:], group)) if guarded else model.steps // 4

        # Below the installation: Node looks for a program's packages in the folders above it.
        with tempfile.TemporaryDirectory(prefix=f"{scenario}-", dir=home, ignore_cleanup_errors=True) as name:
            run = _Run(client, Path(name), home, self._folder, self._bench, group)
            model = Model(
                scenario,
                client.tongue,
                run.work,
                compactions,
                window_tokens=client.window,
                most_answer_tokens=client.most_answer_tokens,
                asks_for_summary=client.asks_for_summary,
                is_commanded=scenario == "own" and len(client.own) > 1,
            )
            watch = self._bench.watch(group, model)
            if scenario == "cancel":
                ended = run.canceled(model, watch)
            else:
                for command in client.own if scenario == "own" else (client.command,):
                    ended = run.ended(_prompt(scenario, client.window), command)
            written = run.work / TARGET
            content = written.read_bytes() if written.is_file() else None
        found = [*judge(scenario, model, watch, ended, content)]
        refused = [line for line in self._bench.proxy.lines[log_since:] if f": refused model={group} " in line]
        if scenario == "unfit" and len(refused) > _MOST_TRIES:
            found.append(f"refused {len(refused)} times")
        if guarded and scenario in ("task", "results", "long"):
            event = "restart outcome=restarted" if scenario == "long" else ""
            made = _compactions(self._bench.proxy.lines[log_since:], group, event)
            number = len(made) + (model.own_summaries if scenario != "long" else 0)
            if number < (2 if scenario == "task" else 1):
                found.append(f"only {number} {'restarts' if scenario == 'long' else 'compactions'}")
        self._bench.forgive(group)
        return found, " ".join(f"{each.prompt_tokens}+{each.completion_tokens}" for each in watch.chats)


def judge(scenario: Name, model: Model, watch: Watch, ended: Ended, content: bytes | None) -> Iterator[str]:
    """What is wrong with a run; nothing if it is as on an endless window.

    Args:
        scenario: what was to be done.
        model: what it was asked.
        watch: what reached the server.
        ended: how the client ended.
        content: of the file that it was to write; None if there is none.
    """
    yield from server_problems(watch)
    yield from model.missed
    if ended.code is None:
        yield f"did not end: {ended.last_words}"
    elif scenario == "cancel":
        if not model.gate.reached.is_set():
            yield f"the answer never began: {ended.last_words}"
        elif open_answers := [record.outcome for record in watch.chats if record.outcome not in ("disconnected", "ok")]:
            yield f"the server went on after the client had gone: {open_answers}"
    elif scenario == "unfit":
        if model.steps:
            yield "an answer to a prompt that cannot fit"
        if not re.search(r"context|token|too (?:long|large)|window", f"{ended.out}{ended.err}", re.IGNORECASE):
            yield f"its user is not told why: {ended.last_words}"
    elif ended.code:
        yield f"exit {ended.code}: {ended.last_words}"
    elif scenario == "long":
        told, wanted = re.findall(r"word\d+", ended.out), re.findall(r"word\d+", model.said)
        if told != wanted:
            yield f"{len(told)} words of {len(wanted)}: {_first_difference(told, wanted)}"
    else:
        if content != CONTENT.encode():
            yield "the file is not there" if content is None else f"the file is not byte for byte: {content[:80]!r}"
        if DONE not in ended.out:
            yield f"the last answer is not shown: {ended.last_words}"
        if scenario == "own":
            if not model.own_summaries:
                yield "it never asked for a summary of its own"
            elif not any(OWN_SUMMARY in record.seen_text for record in watch.chats):
                yield "its own summary never came back"


def _first_difference(told: Sequence[str], wanted: Sequence[str]) -> str:
    where = next((place for place, word in enumerate(told) if place >= len(wanted) or word != wanted[place]), len(told))
    return f"after {' '.join(wanted[max(0, where - 2) : where])} comes {' '.join(told[where : where + 3]) or 'nothing'}"


def server_problems(watch: Watch) -> Iterator[str]:
    """What must never reach a server: a prompt that it cuts, calls without results, results without calls."""
    for number, record in enumerate(watch.chats, 1):
        if record.context_length != _PLAIN_WINDOW and (problem := overrun(record)):
            yield f"request {number}: {problem}"
        yield from (f"request {number}: {problem}" for problem in pairing_problems((record.body or {})["messages"]))


def pairing_problems(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Calls without their results, results without their calls, and roles that no template knows."""
    wanted: set[str] = set()
    for message in messages:
        if message["role"] not in ("system", "user", "assistant", "tool"):
            yield f"the role {message['role']!r}"
        if message["role"] == "tool":
            if message["tool_call_id"] not in wanted:
                yield "a result without its call"
            wanted.discard(message["tool_call_id"])
        elif wanted:
            yield f"{len(wanted)} calls without their results"
            wanted = set()
        wanted |= {call["id"] for call in message.get("tool_calls") or ()}
    if wanted:
        yield f"{len(wanted)} calls without their results at the end"


class _Run:
    """One run of a client: a home and a folder to work in, configured by the lines that `connect` gives."""

    def __init__(self, client: Client, root: Path, home: Path, folder: Path, bench: Bench, group: str) -> None:
        self._client = client
        self._root = root
        self.work = root / "work"
        self.work.mkdir()
        (root / "home").mkdir()
        self._environ = {
            "PATH": search_path(home, folder),
            "HOME": str(root / "home"),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "CI": "1",
            "NO_COLOR": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": MASTER_KEY,
            "MODEL": group,
        }
        self._connect(bench, group)
        self._environ.update(client.environ)
        driver = driver_of(client)
        self._names = {"model": group, "driver": str(root / driver.name), "work": str(self.work)}
        if driver.is_file():
            for path in (driver, driver.with_name("file_tools.py")):
                shutil.copy(path, root)

    def _connect(self, bench: Bench, group: str) -> None:
        window = windows_at(bench.proxy.base_url, MASTER_KEY)[group]
        lines = filled(self._client.connect, Place(group, window, bench.proxy.base_url))
        if "file" in lines:
            file = Path(lines["file"].replace("~", self._environ["HOME"], 1))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(lines["text"], encoding="utf-8")
        elif "text" in lines:
            suffix, exported = ("py", "") if self._client.command[0] == "python" else ("mjs", "\nexport { model };\n")
            (self._root / f"connected.{suffix}").write_text(lines["text"] + exported, encoding="utf-8")
        for name, value in lines.get("environment", {}).items():
            self._environ[name] = str(value).replace("$LITELLM_MASTER_KEY", MASTER_KEY)
        if "command" in lines:
            command = [word.replace("$LITELLM_MASTER_KEY", MASTER_KEY) for word in lines["command"]]
            subprocess.run(
                command, env=self._environ, cwd=self.work, capture_output=True, timeout=_LIMIT_S, check=False
            )

    def ended(self, prompt: str, command: Sequence[str]) -> Ended:
        """Runs a command of its to its end."""
        with (
            self._started(prompt, command) as process,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            process.wait(_LIMIT_S)
        return self._ended(process)

    def canceled(self, model: Model, watch: Watch) -> Ended:
        """Interrupts it, as Ctrl-C does, when the answer has begun."""
        with self._started(_prompt("cancel", self._client.window), self._client.command) as process:
            until_s = time.monotonic() + _LIMIT_S
            while not model.gate.reached.wait(0.2) and process.poll() is None and time.monotonic() < until_s:
                pass
            (os.kill if self._client.has_server else os.killpg)(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CANCEL_LIMIT_S)
            with contextlib.suppress(TimeoutError):
                watch.simulator.wait_until(
                    lambda: all(record.outcome != "running" for record in watch.chats), _CANCEL_LIMIT_S
                )
        model.gate.open()
        return self._ended(process)

    @contextlib.contextmanager
    def _started(self, prompt: str, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        stdin = self._root / "prompt.txt"
        in_arguments = any("{prompt}" in word for word in command)
        stdin.write_text("" if in_arguments else prompt, encoding="utf-8")
        names = {**self._names, "prompt": prompt, "prompt_file": str(stdin)}
        words = [re.sub(r"\{(\w+)\}", lambda found: names[found[1]], word) for word in command]
        self._is_killed = False
        with stdin.open("rb") as given, (self._root / "out").open("wb") as out, (self._root / "err").open("wb") as err:
            process = subprocess.Popen(
                words, stdin=given, stdout=out, stderr=err, cwd=self.work, env=self._environ, start_new_session=True
            )
            try:
                yield process
            finally:
                self._is_killed = process.poll() is None
                # Its children, too: the session is its own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _ended(self, process: subprocess.Popen[bytes]) -> Ended:
        out, err = ((self._root / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        return Ended(None if self._is_killed else process.returncode, out, err)


def _prompt(scenario: Name, window_tokens: int) -> str:
    if scenario == "unfit":
        # An argument of a program may have 128 KB (Linux).
        return f"Sort these words: {prose('unfit', int(1.15 * window_tokens))}"
    if scenario == "long":
        return "Read the files that you need, one after the other, and count aloud after that."
    if scenario == "cancel":
        return "Tell a long story."
    return f"Read the files that you need, one after the other, and write {TARGET} after that."


def _compactions(lines: Sequence[str], group: str, event: str = "") -> list[str]:
    """The log lines of compactions that were made while a client waited; or of another event."""
    made = re.compile(rf"litellm_compaction.*: (?:{event or 'compacted|fallback'}) model={group} ")
    return [line for line in lines if made.search(line)]


@contextlib.contextmanager
def open_matrix(clients: Sequence[Client], folder: Path, data: Path) -> Iterator[Matrix]:
    """A proxy for these clients.

    Args:
        clients: those that may be asked for.
        folder: of their installations.
        data: of the proxy.
    """
    groups = [Group(client.name, client.window) for client in clients]
    groups += [
        _Plain(f"{client.name}-off", _PLAIN_WINDOW, compaction={"mode": "off"}, guarded=False) for client in clients
    ]
    # As config.yaml ships it.
    with open_bench(
        data,
        groups,
        {"keep_originals": "compacted", "background": "idle"},
        general_settings={"cancel_on_disconnect": True},
        process=True,
    ) as bench:
        yield Matrix(bench, folder)
