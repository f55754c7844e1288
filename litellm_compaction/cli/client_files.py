"""Merges values into a client's own configuration file (JSON, TOML, YAML); all else in it stays.

`connect --write` calls it. The edited text is read again and compared with what was wanted: a file that cannot be read,
or would say anything else afterwards, is not touched.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
import tomlkit.exceptions
import yaml

from litellm_compaction.errors import ConfigError

_UNREADABLE = (ValueError, RecursionError, yaml.YAMLError, tomlkit.exceptions.TOMLKitError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The bytes of a file now, None if it is not there yet, and afterwards."""

    path: Path
    before: bytes | None
    after: bytes

    def difference(self) -> str:
        """A unified diff; "" if nothing changes."""
        before, after = ((text or b"").decode("utf-8-sig").splitlines() for text in (self.before, self.after))
        return "\n".join(difflib.unified_diff(before, after, str(self.path), str(self.path), lineterm=""))

    def write(self) -> Path | None:
        """Replaces the file at once, a link's target for a link; returns the copy of the old one beside it.

        Raises:
            ConfigError: the file cannot be written, or was changed since it was read.
        """
        target, backup = self.path.resolve(), None
        try:
            if _content(target) != self.before:
                raise ConfigError(f"{self.path} was changed meanwhile: nothing was written, run this again")
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self.after)
                if self.before is not None:
                    names = (target.with_name(f"{target.name}.bak{number or ''}") for number in range(1000))
                    backup = next(name for name in names if not name.exists())
                    shutil.copy2(target, backup)
                    shutil.copymode(target, draft)
                Path(draft).replace(target)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    Path(draft).unlink()
        except OSError as exc:
            raise ConfigError(f"{self.path} cannot be written ({exc.strerror or exc})") from exc
        return backup


def change_of(path: Path, wanted: Any, if_new: Mapping[str, Any]) -> Change:
    """Plans how a file gets the wanted values.

    Args:
        wanted: mappings are merged, a list's items by their first key; all else replaces what is there.
        if_new: what a file that is made also gets, first.

    Raises:
        ConfigError: the file cannot be read or written, or not be changed without touching more of it.
    """
    try:
        before = _content(path)
        if before is not None and not path.stat().st_mode & stat.S_IWUSR:
            raise ConfigError(f"{path} is read-only")
        text = (before or b"").decode("utf-8-sig")
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read ({exc.strerror or exc})") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8 text") from exc
    has_crlf = text.count("\r\n") == text.count("\n") > 0
    text = text.replace("\r\n", "\n") if has_crlf else text
    new = {**if_new, **wanted} if if_new else wanted
    edited = _edited(path, text, wanted) if text.strip() else rendered(new, path.suffix)
    bom = codecs.BOM_UTF8 if (before or b"").startswith(codecs.BOM_UTF8) else b""
    return Change(path=path, before=before, after=bom + (edited.replace("\n", "\r\n") if has_crlf else edited).encode())


def rendered(values: Any, suffix: str) -> str:
    """The text of a file that holds these values alone."""
    if suffix == ".toml":
        return tomlkit.dumps(values)
    if suffix == ".yaml":
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _edited(path: Path, text: str, wanted: Any) -> str:
    parse, edit = _FORMATS.get(path.suffix, _JSON)
    try:
        known = parse(text)
    except _UNREADABLE as exc:
        raise ConfigError(f"{path} cannot be parsed, so it is not touched") from exc
    merged = _merged(known, wanted)
    if known is None or isinstance(known, type(wanted)):
        # A form that an editor does not know may end in any of these.
        with contextlib.suppress(*_UNREADABLE, AttributeError, LookupError, TypeError):
            edited = text if merged == known else edit(text, wanted)
            if parse(edited) == merged:
                return edited
    raise ConfigError(f"{path} has other values there, or a form that is not edited: merge the lines yourself")


def _merged(known: Any, wanted: Any) -> Any:
    if isinstance(known, dict) and isinstance(wanted, dict):
        return {**known, **{key: _merged(known.get(key), value) for key, value in wanted.items()}}
    if isinstance(known, list) and isinstance(wanted, list) and all(isinstance(item, dict) for item in wanted):
        merged = list(known)
        for item in wanted:
            place = _place(merged, item)
            merged[place : place + 1] = [_merged(merged[place], item) if place < len(merged) else item]
        return merged
    return wanted


def _place(items: Sequence[Any], wanted: Mapping[str, Any]) -> int:
    """The index of the item with the same first key; their number if there is none."""
    key = next(iter(wanted))
    found = (i for i, item in enumerate(items) if isinstance(item, dict) and item.get(key) == wanted[key])
    return next(found, len(items))


def _edit_json(text: str, wanted: Mapping[str, Any]) -> str:
    """Writes the whole file anew, as it is indented: short lists in one line get several."""
    found = re.search(r"^[ \t]+(?=\")", text, re.MULTILINE)
    merged = _merged(json.loads(text), wanted)
    return json.dumps(merged, indent=found[0] if found else 2, ensure_ascii=False) + text[len(text.rstrip()) :]


def _edit_toml(text: str, wanted: Mapping[str, Any]) -> str:
    document = tomlkit.parse(text)

    def merge(table: Any, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and isinstance(table.get(key), dict):
                merge(table[key], value)
            elif table.get(key) != value:
                table[key] = value

    merge(document, wanted)
    return tomlkit.dumps(document)


def _edit_yaml(text: str, wanted: Any) -> str:
    """Adds missing keys, and missing items of one list; values that differ stay, which the caller notices."""
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    known = yaml.safe_load(text)
    if known is None:
        return f"{text.rstrip()}\n{rendered(wanted, '.yaml')}"
    if isinstance(wanted, list):
        return _with_items(text, root, known, wanted)
    missing = {key: value for key, value in wanted.items() if key not in known}
    for key, node in root.value:
        if isinstance(wanted.get(key.value), list) and isinstance(known[key.value], list):
            return _with_items(text, node, known[key.value], wanted[key.value])
    return f"{text.rstrip()}\n{rendered(missing, '.yaml')}"


def _with_items(text: str, node: yaml.Node, known: Sequence[Any], wanted: Sequence[Any]) -> str:
    """The text with the missing items at the end of a list in block style."""
    lines = text.split("\n")
    first, last = node.value[0].start_mark, node.value[-1].end_mark
    column = lines[first.line].rfind("-", 0, first.column)
    # A block's mark stands where the next token begins: comments before it that are not indented as items belong there.
    number = last.line + bool(lines[last.line][: last.column].strip())
    while re.match(rf"\s*$| {{0,{column}}}#", lines[number - 1]):
        number -= 1
    missing = [item for item in wanted if _place(known, item) == len(known)]
    lines[number:number] = (" " * column + line for line in rendered(missing, ".yaml").splitlines())
    return "\n".join(lines)


_Format = tuple[Callable[[str], Any], Callable[[str, Any], str]]
_JSON: _Format = (json.loads, _edit_json)
_FORMATS: Mapping[str, _Format] = {
    ".toml": (lambda text: tomlkit.parse(text).unwrap(), _edit_toml),
    ".yaml": (yaml.safe_load, _edit_yaml),
}
