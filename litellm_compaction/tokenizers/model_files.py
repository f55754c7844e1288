"""The file on this machine that holds the vocabulary of a model that LM Studio lists.

Called off the event loop, where LM Studio may run on the proxy's own machine. LM Studio's layout is `<models
folder>/<publisher>/<repository>/<file>.gguf` (LM Studio docs, "Import models").

A wrong vocabulary is worse than none, so where names leave more than one repository, nothing is chosen. LM Studio's
own notes are optional: it does not document these files, so whatever is absent or has another shape says nothing. Seen
with LM Studio 0.3.31–0.4.25: `~/.lmstudio-home-pointer` (lmstudio-js, findLMStudioHome), `settings.json`
("downloadsFolder"), `.internal/model-index-cache.json`, and `hub/models/<owner>/<name>/model.yaml` (LM Studio docs,
"model.yaml"; lmstudio-bug-tracker 1321).
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from litellm_compaction.windows.lmstudio import WantedModel

_PART = re.compile(r"-\d{5}-of-\d{5}$")
_FIRST_PART = re.compile(r"-00001-of-\d{5}$")
# Names of quantizations as Hugging Face files and repositories carry them: Q4_K_M, IQ2_XXS, UD-Q4_K_XL, i1-Q4_K_S,
# MXFP4_MOE, BF16, 4bit, mlx-8bit, 4bit-DWQ.
_QUANTIZATION = re.compile(
    r"[-._@](?:(?:ud|i1|imat|mlx)[-._])?(?:i?q\d\w*|[tm]q\d\w*|mxfp4\w*|nvfp4\w*|b?f(?:p)?(?:16|32|8)|\d+bit(?:-dwq)?)$"
)
_FORMAT = re.compile(r"[-._](?:gguf|mlx|i1|imat|imatrix)$")
# Projectors for images, draft heads, and matrices for quantizers carry no vocabulary, or one nobody talks to.
_COMPANION = re.compile(r"^(?:mmproj|mtp|imatrix)[-._]|[-._]mmproj[-._]|^mmproj", re.IGNORECASE)
_MAX_BYTES = 32 * 2**20
_MAX_YAML_BYTES = 256 * 1024
_MAX_POINTER_BYTES = 4096
_MAX_ROWS = 10_000
# A model.yaml may name another one as its base.
_MAX_CHAIN = 3
_NOWHERE = Path("/nonexistent")
_KEY = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+", re.ASCII)
# Somebody may have pointed the setting at a whole disk.
_MAX_ENTRIES = 20_000
_MAX_FOUND = 1024
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """One downloaded repository.

    Attributes:
        publisher: the folder above it.
        files: names of the .gguf files that hold metadata, sorted; a subfolder's with "/".
        has_tokenizer: there is a tokenizer.json beside safetensors (MLX).
    """

    publisher: str
    name: str
    files: tuple[str, ...]
    has_tokenizer: bool = False

    @property
    def path(self) -> str:
        """As LM Studio's index writes it: `publisher/repo`."""
        return f"{self.publisher}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A repository, and one of its .gguf files; `file` is None for its tokenizer.json."""

    repository: Repository
    file: str | None


def holds_vocabulary(file_name: str) -> bool:
    """Whether a file of this name is a model's .gguf, or the first part of one."""
    stem = file_name[:-5]
    if not file_name.lower().endswith(".gguf") or _COMPANION.search(file_name):
        return False
    return _PART.search(stem) is None or _FIRST_PART.search(stem) is not None


def by_path(repositories: tuple[Repository, ...], paths: frozenset[str]) -> Choice | None:
    """The one that LM Studio's index names, if all paths lie in the same repository."""
    found: list[Choice] = []
    for repository in repositories:
        for path in sorted(paths):
            if path.lower() == repository.path.lower():
                found += _whole(repository, "")
            elif path.lower().startswith(repository.path.lower() + "/"):
                inner = path[len(repository.path) + 1 :].lower()
                named = [file for file in repository.files if file.lower() == inner]
                found += [Choice(repository=repository, file=file) for file in named] or _folder_of(repository, inner)
    return found[0] if len({choice.repository for choice in found}) == 1 else None


def by_base(
    repositories: tuple[Repository, ...], bases: tuple[tuple[str, str], ...], quantization: str
) -> Choice | None:
    """The first of the bases of a virtual model that is downloaded: all of them have the same vocabulary."""
    for user, repo in bases:
        for repository in repositories:
            if (repository.publisher.lower(), repository.name.lower()) == (user.lower(), repo.lower()):
                found = _whole(repository, quantization)
                if found:
                    return found[0]
    return None


def by_name(
    repositories: tuple[Repository, ...], key: str, publisher: str = "", quantization: str = ""
) -> Choice | None:
    """The one whose name, or whose file's name, is the key's without publisher, format and quantization.

    Args:
        key: such as `qwen/qwen3-8b`, `qwen3-8b@q4_k_m`, or a path inside the models folder.
        publisher: decides between repositories of equal names.
        quantization: such as `Q4_K_M`; preferred, but any will do.
    """
    given = key.replace("\\", "/").lower()
    exact = by_path(repositories, frozenset({given}))
    if exact is not None:
        return exact
    before, _, name = given.partition("@")[0].rpartition("/")
    wanted_quantization = given.partition("@")[2] or quantization
    for read in (_whole_name, plain_name):
        found = [choice for repo in repositories for choice in _matching(repo, name, read, wanted_quantization)]
        # The files of one repository that match are one model.
        first = {choice.repository: choice for choice in reversed(found)}
        if len(first) == 1:
            return next(iter(first.values()))
        preferred = [
            choice
            for repository, choice in first.items()
            if repository.publisher.lower() in {publisher.lower(), before} - {""}
        ]
        if len(preferred) == 1:
            return preferred[0]
        if first:
            return None
    return None


def plain_name(name: str) -> str:
    """A repository's or file's name without `.gguf`, part number, format and quantization, in lower case."""
    plain = name.lower().removesuffix(".gguf")
    plain = _PART.sub("", plain)
    while True:
        shorter = _FORMAT.sub("", _QUANTIZATION.sub("", plain))
        if shorter == plain or not shorter:
            return plain
        plain = shorter


def _whole_name(name: str) -> str:
    return name.lower().removesuffix(".gguf")


def _matching(repository: Repository, name: str, read: Callable[[str], str], quantization: str) -> list[Choice]:
    wanted = read(name)
    own = [file for file in repository.files if read(file.rpartition("/")[2]) == wanted]
    if own:
        return _chosen(repository, tuple(own), quantization)
    return _whole(repository, quantization) if read(repository.name) == wanted else []


def _whole(repository: Repository, quantization: str) -> list[Choice]:
    """The repository as one model; nothing if its files are of several."""
    if len({plain_name(file.rpartition("/")[2]) for file in repository.files}) > 1:
        return []
    if repository.files:
        return _chosen(repository, repository.files, quantization)
    return [Choice(repository=repository, file=None)] if repository.has_tokenizer else []


def _folder_of(repository: Repository, inner: str) -> list[Choice]:
    """For a path to a file that holds no metadata, such as a later part."""
    return _whole(repository, "") if inner.endswith((".gguf", ".safetensors", ".json")) else []


def _chosen(repository: Repository, files: tuple[str, ...], quantization: str) -> list[Choice]:
    mark = quantization.lower()
    like = [file for file in files if mark and mark in file.lower()]
    return [Choice(repository=repository, file=file) for file in (like or files)[:1]]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """Where a vocabulary can be read."""

    path: Path
    kind: Literal["gguf", "tokenizer_json"]


class _Watched(NamedTuple):
    """A folder or file, and its modification time when it was read; -1 where it was not there."""

    path: Path
    mtime_ns: int


class ModelFiles:
    """The downloaded models of one LM Studio; safe to use from several threads.

    Folders are read again only when one of them has changed. Nothing outside the models folder is ever given, links
    included.

    Args:
        folder: with the publishers in it; None asks LM Studio's settings.
        home: LM Studio's own folder; None looks where it is usually kept.
    """

    def __init__(self, folder: Path | None = None, *, home: Path | None = None) -> None:
        self._home = home or lmstudio_home()
        self._given = folder
        self._lock = threading.Lock()
        self._watched: tuple[_Watched, ...] = ()
        self._repositories: tuple[Repository, ...] = ()
        self._found: dict[WantedModel, ModelFile | None] = {}

    def find(self, wanted: WantedModel) -> ModelFile | None:
        """The file for a listed model, None if there is none or names leave a doubt. Never raises.

        LM Studio's own index decides, then the model.yaml of a virtual model, then names. First time 1 to 50 ms.
        """
        folder = self._given or models_folder(self._home)
        with self._lock:
            self._refresh(folder)
            if wanted not in self._found:
                choice = self._choose(wanted)
                self._found[wanted] = _file(folder, choice) if choice is not None else None
            return self._found[wanted]

    def _choose(self, wanted: WantedModel) -> Choice | None:
        repositories = tuple(filter(None, (_of_format(found, wanted.file_format) for found in self._repositories)))
        if not repositories or not wanted.key:
            return None
        bare = wanted.key.partition("@")[0]
        names = tuple(filter(None, (wanted.variant, wanted.key, bare)))
        quantization = wanted.variant.partition("@")[2] or wanted.quantization
        return (
            by_path(repositories, indexed_paths(self._home, names))
            or by_base(repositories, virtual_bases(self._home, bare), quantization)
            or by_name(repositories, wanted.key, wanted.publisher, quantization)
        )

    def _refresh(self, folder: Path) -> None:
        unchanged = self._watched and self._watched[0].path == folder
        if unchanged and all(_mtime_ns(known.path) == known.mtime_ns for known in self._watched):
            if len(self._found) > _MAX_FOUND:
                self._found.clear()
            return
        index = index_file(self._home)
        index_seen = _Watched(index, _mtime_ns(index))
        scan = _Scan(folder)
        self._repositories = tuple(scan.repositories())
        self._watched = (*scan.watched, index_seen)
        self._found.clear()


class _Scan:
    """One walk over a models folder: at most `_MAX_ENTRIES` entries, down to the subfolders of repositories."""

    def __init__(self, root: Path) -> None:
        self.watched: list[_Watched] = []
        self._root = root
        self._left = _MAX_ENTRIES
        try:
            self._real_root = os.path.realpath(root)
        except (OSError, ValueError):
            # No path at all, such as one with a null character.
            self._left = 0

    def repositories(self) -> list[Repository]:
        """What there is, by path; a repository that cannot be read is left out."""
        publishers, _ = self._read(self._root)
        found = (self._repository(publisher, repo) for publisher in publishers for repo in self._read(publisher)[0])
        return [repository for repository in found if repository.files or repository.has_tokenizer]

    def _repository(self, publisher: Path, folder: Path) -> Repository:
        subfolders, files = self._read(folder)
        # Large quantizations lie in a subfolder each.
        inner = [f"{sub.name}/{name}" for sub in subfolders for name in self._read(sub)[1]]
        return Repository(
            publisher=publisher.name,
            name=folder.name,
            files=tuple(filter(holds_vocabulary, [*files, *inner])),
            has_tokenizer=TOKENIZER in files and any(name.endswith(".safetensors") for name in files),
        )

    def _read(self, folder: Path) -> tuple[list[Path], list[str]]:
        """Subfolders and names of files, sorted."""
        # Before the entries: what is added meanwhile is seen next time.
        self.watched.append(_Watched(folder, _mtime_ns(folder)))
        subfolders: list[Path] = []
        names: list[str] = []
        if self._left <= 0:
            return [], []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._left <= 0:
                        break
                    self._left -= 1
                    if entry.name.startswith(".") or (entry.is_symlink() and not self._is_inside(entry.path)):
                        continue
                    # Unlike DirEntry's, these take a link to itself for nothing instead of failing.
                    path = Path(entry.path)
                    if path.is_dir():
                        subfolders.append(path)
                    elif path.is_file():
                        names.append(entry.name)
        except (OSError, ValueError):
            # Not there, not ours to read, or a setting that is no path: nothing is found in it.
            return [], []
        return sorted(subfolders), sorted(names)

    def _is_inside(self, path: str) -> bool:
        real = os.path.realpath(path)
        return real.startswith(os.path.join(self._real_root, ""))  # noqa: PTH118 - keeps the separator at the end


def _of_format(repository: Repository, file_format: str) -> Repository | None:
    """The repository as far as it holds the format; None if it does not."""
    if file_format == "mlx":
        return replace(repository, files=()) if repository.has_tokenizer else None
    return repository if repository.files or not file_format else None


def _file(folder: Path, choice: Choice) -> ModelFile:
    place = folder / choice.repository.publisher / choice.repository.name
    if choice.file is None:
        return ModelFile(path=place / TOKENIZER, kind="tokenizer_json")
    return ModelFile(path=place / choice.file, kind="gguf")


def _mtime_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except (OSError, ValueError):
        return -1
