"""What an operator's settings about tokenizers mean, and whether they can be followed.

Called by `sources.py`; at start, and by `doctor`, to find what is wrong before a request does.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from litellm_compaction.config import AUTO_TOKENIZER, Settings
from litellm_compaction.errors import ConfigError, UnusableModelFile
from litellm_compaction.models.families import HEURISTIC, family_of
from litellm_compaction.models.hub import PREFIX, is_repository, repository_of
from litellm_compaction.models.tokenizer_files import load_tokenizer_file

_FILE_SUFFIXES = (".gguf", ".json")


def check_tokenizer(value: str, place: str) -> None:
    """Makes sure that a `tokenizer:` setting can be followed; reads the file, so that it is there from the start.

    Args:
        value: as written.
        place: how the key is called in errors.

    Raises:
        ConfigError: there is no such file, it cannot be used, or nobody knows such a model.
    """
    if value in (AUTO_TOKENIZER, HEURISTIC.name):
        return
    repository = repository_of(value)
    if repository is not None:
        # Asked for when it is needed: a proxy starts offline too.
        if not is_repository(repository):
            raise ConfigError(f"{place} = {value!r}: allowed behind `{PREFIX}`: a repository, as organisation/name")
        return
    path = tokenizer_path(value)
    if path is None:
        if family_of("", value).name == "unknown":
            raise ConfigError(
                f"{place} = {value!r}: allowed: {AUTO_TOKENIZER}, {HEURISTIC.name}, the path of a .gguf or "
                f"tokenizer.json file or of the folder with it, {PREFIX}organisation/name for a download from Hugging "
                "Face, or a model's name of a known family (llama-3.1-8b)"
            )
        return
    try:
        load_tokenizer_file(path)
    except UnusableModelFile as error:
        raise ConfigError(
            f"{place} = {value!r}: {error.problem}. Write the path of an intact .gguf or tokenizer.json file of the "
            f"model, or `{AUTO_TOKENIZER}`."
        ) from error


def check_sources(settings: Settings, place: str) -> None:
    """Makes sure that the global settings about tokenizers can be followed.

    Raises:
        ConfigError: see `check_tokenizer`; or `models_folder` is no folder.
    """
    check_tokenizer(settings.tokenizer, f"{place}.tokenizer")
    if settings.models_folder and not _is_folder(expanded(settings.models_folder)):
        raise ConfigError(
            f"{place}.models_folder = {settings.models_folder!r}: allowed: a folder that is there, as the proxy sees "
            "it, with LM Studio's <publisher>/<model> folders in it; or leave it out"
        )


def tokenizer_path(value: str) -> Path | None:
    """The path that a `tokenizer:` setting is; None where it is `auto`, `heuristic`, a repository, or a model."""
    if value in (AUTO_TOKENIZER, HEURISTIC.name) or repository_of(value) is not None:
        return None
    looks_like_path = "/" in value or "\\" in value or value.lower().endswith(_FILE_SUFFIXES)
    return expanded(value) if looks_like_path or _is_folder(Path(value)) else None


@lru_cache(maxsize=256)
def is_this_machine(api_base: str | None) -> bool:
    """Whether an address certainly leads to the machine that the proxy runs on."""
    if not api_base:
        return False
    try:
        host = urlsplit(api_base if "//" in api_base else f"//{api_base}").hostname or ""
        return host == "localhost" or host.endswith(".localhost") or _is_own(ipaddress.ip_address(host))
    except ValueError:
        return False


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_loopback or address.is_unspecified


def expanded(value: str) -> Path:
    """The path that an operator wrote, with `~` for the home folder."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        # There is no home folder; the reader will say that there is no such file.
        return Path(value)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
