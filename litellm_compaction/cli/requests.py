"""Requests in files and lines, for `count` and `compact`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, NamedTuple

from litellm_compaction.core.messages import JsonValue, Request
from litellm_compaction.errors import CompactionError
from litellm_compaction.library.tokens import parsed

# The longest context windows hold about 4 MB of text; images come as base64 beside it.
MAX_BYTES = 128 * 2**20
_SHAPE = '{"messages": […], "tools": […]}'


class BadRequest(CompactionError):
    """An input is no request; the message names the place and the expected form."""


class Asked(NamedTuple):
    """A request; `fields` are all of its keys, `model` is "" if it names none."""

    model: str
    request: Request
    fields: Mapping[str, JsonValue]


@contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """A file, or the standard input for `-`.

    Raises:
        BadRequest: it cannot be opened.
    """
    try:
        file = sys.stdin.buffer if name == "-" else Path(name).open("rb")  # noqa: SIM115 - closed below; only opening is mapped
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "no possible path"
        raise BadRequest(f"{name}: cannot be read: {reason}") from exc
    with nullcontext() if name == "-" else file:
        yield file


def lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of an input; of one that is too long, only enough to show that."""
    while line := file.readline(MAX_BYTES + 1):
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_BYTES)):
            pass
        yield line.rstrip(b"\r\n") if len(line) <= MAX_BYTES else line


def read_request(name: str) -> Asked:
    """The request in a file, or in the standard input for `-`.

    Raises:
        BadRequest: it cannot be read, or is no request.
    """
    with opened(name) as file:
        try:
            return parse_request(file.read(MAX_BYTES + 1))
        except (OSError, BadRequest) as exc:
            raise BadRequest(f"{'stdin' if name == '-' else name}: {exc}") from exc


def parse_request(raw: bytes) -> Asked:
    """The request in a JSON document; a list is one without tools.

    Raises:
        BadRequest: it is something else.
    """
    if len(raw) > MAX_BYTES:
        raise BadRequest(f"the request is larger than {MAX_BYTES} bytes")
    if not raw.strip():
        raise BadRequest(f"the input is empty; expected: {_SHAPE}")
    try:
        document = json.loads(raw)
    except UnicodeDecodeError as exc:
        raise BadRequest(f"not UTF-8 at byte {exc.start}") from exc
    except json.JSONDecodeError as exc:
        raise BadRequest(f"not JSON at line {exc.lineno}, column {exc.colno}: {exc.msg}") from exc
    except (RecursionError, ValueError) as exc:
        raise BadRequest(f"JSON that cannot be read ({type(exc).__name__})") from exc
    fields = {"messages": document} if isinstance(document, list) and document else document
    if not isinstance(fields, dict):
        raise BadRequest(f"expected a JSON object {_SHAPE}, or its messages alone")
    model, tools = fields.get("model", ""), fields.get("tools") or fields.get("functions") or []
    if not isinstance(model, str):
        raise BadRequest("model: expected a text")
    if not isinstance(fields.get("messages"), list):
        raise BadRequest("messages: expected a list")
    if not isinstance(tools, list):
        raise BadRequest("tools: expected a list")
    try:
        messages = parsed(fields["messages"])
    except ValueError as exc:
        raise BadRequest(str(exc)) from exc
    return Asked(model, Request(messages=messages, tools=tuple(tools), tool_choice=fields.get("tool_choice")), fields)
