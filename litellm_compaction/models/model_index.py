"""What LM Studio's own notes say about where it keeps its models, and which files belong to which key.

Called by `model_files.py`, off the event loop. All of it is optional: LM Studio does not document these files, so
whatever is absent or has another shape says nothing. Seen with LM Studio 0.3.31–0.4.25:
`~/.lmstudio-home-pointer` (lmstudio-js, findLMStudioHome), `settings.json` ("downloadsFolder"),
`.internal/model-index-cache.json`, and `hub/models/<owner>/<name>/model.yaml` (LM Studio docs, "model.yaml";
lmstudio-bug-tracker 1321).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

_MAX_BYTES = 32 * 2**20
_MAX_YAML_BYTES = 256 * 1024
_MAX_POINTER_BYTES = 4096
_MAX_ROWS = 10_000
# A model.yaml may name another one as its base.
_MAX_CHAIN = 3
_NOWHERE = Path("/nonexistent")
_KEY = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+", re.ASCII)


def lmstudio_home(user_home: Path | None = None) -> Path:
    """LM Studio's folder of a user: where its pointer says, else the older `.cache/lm-studio`, else `.lmstudio`.

    Args:
        user_home: of the proxy's own user, if None.
    """
    try:
        user_home = user_home or Path.home()
    except RuntimeError:
        # A container's user need not have one.
        return _NOWHERE
    pointer = _read(user_home / ".lmstudio-home-pointer", _MAX_POINTER_BYTES).decode("utf-8", "replace").strip()
    if pointer and "\0" not in pointer and Path(pointer).is_absolute():
        return Path(pointer)
    older = user_home / ".cache" / "lm-studio"
    return older if _is_dir(older / "models") else user_home / ".lmstudio"


def models_folder(home: Path) -> Path:
    """Where LM Studio downloads to: as set by its user, else `models` in its own folder."""
    folder = _object(home / "settings.json").get("downloadsFolder")
    if isinstance(folder, str) and "\0" not in folder and Path(folder).is_absolute():
        return Path(folder)
    return home / "models"


def index_file(home: Path) -> Path:
    """Where LM Studio keeps its index; written anew whenever models come or go."""
    return home / ".internal" / "model-index-cache.json"


def indexed_paths(home: Path, keys: tuple[str, ...]) -> frozenset[str]:
    """What LM Studio's index resolves the first key that it knows to: paths inside the models folder.

    Such as `publisher/repo/file.gguf`; several for a model with several quantizations. A virtual model
    (`qwen/qwen3-8b`) is followed to the downloaded one that it stands for.
    """
    rows = _object(index_file(home)).get("models")
    if not isinstance(rows, list):
        return frozenset()
    for key in keys:
        paths = frozenset(path.replace("\\", "/") for row in rows[:_MAX_ROWS] for path in _row_paths(row, key))
        if paths:
            return paths
    return frozenset()


def virtual_bases(home: Path, key: str) -> tuple[tuple[str, str], ...]:
    """Publishers and repositories that the model.yaml of a key names, in its order; none without such a file."""
    bases: list[tuple[str, str]] = []
    for _ in range(_MAX_CHAIN):
        # Keys come from clients, so one must not lead to a file elsewhere.
        if not _KEY.fullmatch(key):
            break
        owner, name = key.split("/")
        base = _yaml_object(home / "hub" / "models" / owner / name / "model.yaml").get("base")
        if isinstance(base, list):
            bases += [source for entry in base[:_MAX_ROWS] for source in _sources(entry)]
        if not isinstance(base, str):
            break
        key = base
    return tuple(bases)


def _row_paths(row: object, key: str) -> Iterator[str]:
    if not isinstance(row, dict):
        return
    path, virtual = row.get("indexedModelIdentifier"), row.get("virtual")
    names = [path, row.get("defaultIdentifier")]
    if isinstance(virtual, dict):
        chain = virtual.get("baseChain")
        names += chain[:1] if isinstance(chain, list) else []
        path = virtual.get("concreteModelIndexedModelIdentifier")
    if key in names and isinstance(path, str) and path:
        yield path


def _sources(entry: object) -> Iterator[tuple[str, str]]:
    sources = entry.get("sources") if isinstance(entry, dict) else None
    for source in sources if isinstance(sources, list) else ():
        if isinstance(source, dict):
            user, repo = source.get("user"), source.get("repo")
            if isinstance(user, str) and isinstance(repo, str):
                yield user, repo


def _object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(_read(path, _MAX_BYTES) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _yaml_object(path: Path) -> dict[str, object]:
    try:
        value = yaml.safe_load(_read(path, _MAX_YAML_BYTES).decode("utf-8", "replace"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file; none if it is absent, unreadable or larger."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except (OSError, ValueError):
        return b""
    return raw if len(raw) <= max_bytes else b""


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
