"""The file on this machine that holds the vocabulary of a model that LM Studio lists.

Called off the event loop, where LM Studio may run on the proxy's own machine. LM Studio's layout is
`<models folder>/<publisher>/<repository>/<file>.gguf` (LM Studio docs, "Import models").
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from litellm_compaction.models.model_index import index_file, indexed_paths, lmstudio_home, models_folder, virtual_bases
from litellm_compaction.models.model_names import Choice, Repository, by_base, by_name, by_path, holds_vocabulary

# Somebody may have pointed the setting at a whole disk.
_MAX_ENTRIES = 20_000
_MAX_FOUND = 1024
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """Where a vocabulary can be read."""

    path: Path
    kind: Literal["gguf", "tokenizer_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModel:
    """A model as LM Studio lists it; "" for what it does not say.

    Attributes:
        key: `key` of /api/v1/models, `id` of /api/v0/models.
        publisher: decides between repositories of equal names.
        variant: `selected_variant`, such as `google/gemma-4-26b-a4b@q4_k_m`.
        quantization: its name, such as `Q4_K_M`; preferred, but all have the same vocabulary.
        file_format: `format` of v1, `compatibility_type` of v0.
        path: of the very file, where the server says it (llama.cpp's `model_path`).
    """

    key: str
    publisher: str = ""
    variant: str = ""
    quantization: str = ""
    file_format: Literal["gguf", "mlx", ""] = ""
    path: str = ""


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
