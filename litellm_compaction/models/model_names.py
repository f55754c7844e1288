"""Which of the downloaded repositories a model's key means, going by names alone.

Pure; called by `model_files.py`, which reads the folders. A wrong vocabulary is worse than none, so where names leave
more than one repository, nothing is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

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
