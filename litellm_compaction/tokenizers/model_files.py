"""The file on this machine that holds the vocabulary of a model that LM Studio lists.

Called off the event loop, if LM Studio may run on the proxy's own machine. LM Studio's layout is `<models
folder>/<publisher>/<repository>/<file>.gguf` (LM Studio docs, "Import models"). A wrong vocabulary is worse than none,
so nothing is chosen if names leave more than one repository.

LM Studio does not document its own notes, so whatever is absent or has another shape says nothing. Seen with LM Studio
0.3.31–0.4.25: `~/.lmstudio-home-pointer` (lmstudio-js, findLMStudioHome), `settings.json` ("downloadsFolder") and
`.internal/model-index-cache.json`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from litellm_compaction.windows.lmstudio import WantedModel

_PART = re.compile(r"-\d{5}-of-\d{5}$")
_FIRST_PART = re.compile(r"-00001-of-\d{5}$")
# What repositories and files add to a model's name besides its quantization.
_FORMAT = re.compile(r"(?:[-._](?:gguf|mlx|ud|i1|imatrix|\d+bit))+$")
# Projectors for images, draft heads, and matrices for quantizers carry no vocabulary, or one that serves no chat.
_COMPANION = re.compile(r"^(?:mmproj|mtp|imatrix)[-._]|[-._]mmproj[-._]|^mmproj", re.IGNORECASE)
_MAX_BYTES = 32 * 2**20
_MAX_POINTER_BYTES = 4096
_MAX_ROWS = 10_000
_NOWHERE = Path("/nonexistent")
# The operator may have pointed the setting at a whole disk.
_MAX_ENTRIES = 20_000
# Large quantizations lie in a subfolder each.
_PLACES = ("*/*/*", "*/*/*/*")
TOKENIZER = "tokenizer.json"


class _Candidate(NamedTuple):
    publisher: str
    repository: str
    file: str

    @property
    def folder(self) -> str:
        return f"{self.publisher}/{self.repository}".lower()

    def path_in(self, root: Path) -> Path:
        return root / self.publisher / self.repository / self.file

    def is_named(self, name: str, quantization: str) -> bool:
        """Returns True if the file has the name, or its repository has it and holds nothing but that model."""
        file = self.file.rpartition("/")[2].lower()
        if plain_name(file, quantization) == name:
            return True
        return plain_name(self.repository) == name and (file == TOKENIZER or file.startswith(name))


class ModelFiles:
    """The downloaded models of one LM Studio.

    Args:
        folder: with the publishers in it; None asks LM Studio's settings.
        home: LM Studio's own folder; None looks where it is usually kept.
    """

    def __init__(self, folder: Path | None = None, *, home: Path | None = None) -> None:
        self._home = home or lmstudio_home()
        self._given = folder

    def find(self, wanted: WantedModel) -> Path | None:
        """The file for a listed model, None if there is none or names leave a doubt: 1 to 50 ms. Never raises.

        LM Studio's own index decides, then names. Nothing outside the models folder is ever given, links included.
        """
        root = self._given or models_folder(self._home)
        bare, _, mark = wanted.key.partition("@")
        before, _, name = bare.lower().rpartition("/")
        quantization = wanted.variant.partition("@")[2] or mark or wanted.quantization
        plain = plain_name(name, quantization)
        found = [each for each in _candidates(root) if _is_of_format(each, wanted.file_format)]
        chosen = (
            _at_paths(found, _indexed_paths(self._home, (wanted.variant, wanted.key, bare)))
            or _at_paths(found, frozenset({bare}))
            or [each for each in found if plain and each.is_named(plain, quantization)]
        )
        if len({each.folder for each in chosen}) > 1:
            publishers = {wanted.publisher.lower(), before} - {""}
            chosen = [each for each in chosen if each.publisher.lower() in publishers]
        # The files of one repository are quantizations of one model, which share its vocabulary.
        return chosen[0].path_in(root) if len({each.folder for each in chosen}) == 1 else None


def plain_name(name: str, quantization: str = "") -> str:
    """A repository's or file's name without `.gguf`, part number, quantization and format, in lower case."""
    plain = _PART.sub("", name.lower().removesuffix(".gguf"))
    return _FORMAT.sub("", _FORMAT.sub("", plain).removesuffix(quantization.lower()).rstrip("-._"))


def holds_vocabulary(file_name: str) -> bool:
    """Returns True if a file of this name is a model's .gguf, or the first part of one."""
    stem = file_name[:-5]
    if not file_name.lower().endswith(".gguf") or _COMPANION.search(file_name):
        return False
    return _PART.search(stem) is None or _FIRST_PART.search(stem) is not None


def _candidates(root: Path) -> list[_Candidate]:
    """The files in the folder, by path; without weights next to it (MLX) a tokenizer.json may be anything."""
    paths: list[tuple[str, ...]] = []
    # Not there, not ours to read, or a setting that is no path.
    with contextlib.suppress(OSError, ValueError):
        for pattern in _PLACES:
            paths += [path.relative_to(root).parts for path in islice(root.glob(pattern), _MAX_ENTRIES)]
    weighed = {parts[:2] for parts in paths if parts[-1].endswith(".safetensors")}
    found = [
        _Candidate(parts[0], parts[1], "/".join(parts[2:]))
        for parts in sorted(paths)
        if not any(part.startswith(".") for part in parts)
        and (holds_vocabulary(parts[-1]) or (parts[2:] == (TOKENIZER,) and parts[:2] in weighed))
    ]
    return [each for each in found if _is_inside(root, each.path_in(root))]


def _is_of_format(candidate: _Candidate, file_format: str) -> bool:
    return not file_format or (candidate.file == TOKENIZER) == (file_format == "mlx")


def _at_paths(candidates: list[_Candidate], paths: frozenset[str]) -> list[_Candidate]:
    """Those at a path, or in the repository of one model that a path is or leads into, as a later part's does."""
    wanted = {path.lower() for path in paths}
    exact = [each for each in candidates if f"{each.folder}/{each.file.lower()}" in wanted]
    folders = {"/".join(path.split("/")[:2]) for path in wanted}
    within = [each for each in candidates if each.folder in folders]
    return exact or (
        within if len(within) == 1 else [each for each in within if each.is_named(plain_name(each.repository), "")]
    )


def _is_inside(root: Path, path: Path) -> bool:
    try:
        return path.is_file() and path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):
        return False


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
    """LM Studio's folder for downloads: as set by its user, else `models` in its own folder."""
    folder = _object(home / "settings.json").get("downloadsFolder")
    if isinstance(folder, str) and "\0" not in folder and Path(folder).is_absolute():
        return Path(folder)
    return home / "models"


def _indexed_paths(home: Path, keys: tuple[str, ...]) -> frozenset[str]:
    """The paths inside the models folder to which LM Studio's index resolves the first key that it knows.

    Such as `publisher/repo/file.gguf`; several for a model with several quantizations. A virtual model
    (`qwen/qwen3-8b`) is followed to the downloaded one that it stands for.
    """
    rows = _object(home / ".internal" / "model-index-cache.json").get("models")
    if not isinstance(rows, list):
        return frozenset()
    for key in filter(None, keys):
        paths = frozenset(path.replace("\\", "/") for row in rows[:_MAX_ROWS] for path in _row_paths(row, key))
        if paths:
            return paths
    return frozenset()


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


def _object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(_read(path, _MAX_BYTES) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read(path: Path, max_bytes: int) -> bytes:
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
