"""Requests as files and lines hold them, and what is wrong with those that do not. Called by `count`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from litellm_compaction.core.messages import JsonValue, Request, parse_message
from litellm_compaction.errors import CompactionError

# The longest context windows hold about 4 MB of text; images come as base64 beside it.
MAX_BYTES = 128 * 2**20


class BadRequest(CompactionError):
    """An input is no request; the message says where and what was expected."""


class Asked(NamedTuple):
    """A request and the model that it names; "" if it names none."""

    model: str
    request: Request


@contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """A file's bytes, or those of the standard input for `-`.

    Raises:
        BadRequest: it cannot be read.
    """
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = Path(name).open("rb")  # noqa: SIM115 - closed below; only opening is mapped
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "no possible path"
        raise BadRequest(f"{name}: cannot be read: {reason}") from exc
    with file:
        yield file


def read_request(file: BinaryIO) -> Asked:
    """The one request that is the whole input.

    Raises:
        BadRequest: the input is empty, too large, or no request.
    """
    try:
        raw = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise BadRequest(f"the input cannot be read: {exc.strerror}") from exc
    return parse_request(raw)


def lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of an input; of one that is too long as much as shows that."""
    while line := file.readline(MAX_BYTES + 1):
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_BYTES)):
            pass
        yield line.rstrip(b"\r\n") if len(line) <= MAX_BYTES else line


def parse_request(raw: bytes) -> Asked:
    """The request that a JSON document is.

    Raises:
        BadRequest: it is something else.
    """
    if len(raw) > MAX_BYTES:
        raise BadRequest(f"the request is larger than {MAX_BYTES} bytes")
    if not raw.strip():
        raise BadRequest('the input is empty; expected: {"messages": […], "tools": […]}')
    try:
        document = json.loads(raw)
    except UnicodeDecodeError as exc:
        raise BadRequest(f"not UTF-8 at byte {exc.start}") from exc
    except json.JSONDecodeError as exc:
        raise BadRequest(f"not JSON at line {exc.lineno}, column {exc.colno}: {exc.msg}") from exc
    except (RecursionError, ValueError) as exc:
        raise BadRequest(f"JSON that cannot be read ({type(exc).__name__})") from exc
    if not isinstance(document, dict):
        raise BadRequest('expected a JSON object {"messages": […], "tools": […]}')
    model = document.get("model", "")
    if not isinstance(model, str):
        raise BadRequest("model: expected a text")
    return Asked(model, Request(messages=tuple(map(parse_message, _messages(document))), tools=_tools(document)))


def _messages(document: Mapping[str, JsonValue]) -> list[dict[str, JsonValue]]:
    found = document.get("messages")
    if not isinstance(found, list):
        raise BadRequest("messages: expected a list")
    messages: list[dict[str, JsonValue]] = []
    for index, message in enumerate(found):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{index}]: expected an object with a role")
        messages.append(message)
    return messages


def _tools(document: Mapping[str, JsonValue]) -> tuple[JsonValue, ...]:
    found = document.get("tools") or document.get("functions") or []
    if not isinstance(found, list):
        raise BadRequest("tools: expected a list")
    return tuple(found)
