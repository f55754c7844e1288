"""A model's tokenizer.json and chat template from Hugging Face, for operators who allow that.

Called by `sources.py`, which asks for nothing else there: no weights, no code. Files stay in `huggingface_hub`'s own
cache and are not looked for again once they are there, so that a proxy works offline afterwards.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from litellm_compaction.concurrency import Bounded
from litellm_compaction.errors import UnusableModelFile

PREFIX = "hf:"
_TOKENIZER = "tokenizer.json"
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# Gemma's tokenizer.json is the largest known, 33 MB; limits as in `files.py`.
_MAX_BYTES, _MAX_SIDE_BYTES = 128 * 2**20, 8 * 2**20
_ANSWER_S = 10.0
_LIMIT_S = 300.0
# A server that said no will say so for a while; one that did not answer may be back soon.
_REFUSED_S, _SILENT_S = 3600.0, 300.0
# Wildcard deployments get their model names from clients.
_MAX_REPOSITORIES = 256
_OWN_FILE = "Set `tokenizer:` to a tokenizer.json or .gguf file of the model, or set tokenizer_download to false."


class _Known(NamedTuple):
    result: Path | UnusableModelFile
    until_s: float


class Hub:
    """Repositories by name; each is asked for once at a time, and what was said is remembered.

    Args:
        fetch: gives the folder with a repository's files, or raises `UnusableModelFile`; runs in a thread of its own.
        limit_s: how long anybody waits for it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        fetch: Callable[[str], Path] | None = None,
        *,
        limit_s: float = _LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch or fetch_files
        self._limit_s = limit_s
        self._clock = clock
        self._known: Bounded[str, _Known] = Bounded(_MAX_REPOSITORIES)
        self._running: dict[str, asyncio.Future[Path]] = {}

    async def folder(self, repository: str) -> Path:
        """The folder with a repository's tokenizer.json.

        Raises:
            UnusableModelFile: there is none, it may not be had, or nobody answered in time; says what to do.
        """
        known = self._known.get(repository)
        if known is None or self._clock() >= known.until_s:
            known = await self._asked(repository)
            self._known[repository] = known
        if isinstance(known.result, Path):
            return known.result
        raise known.result

    async def _asked(self, repository: str) -> _Known:
        running = self._running.get(repository)
        if running is None:
            running = self._running[repository] = _in_thread(self._fetch, repository)
            running.add_done_callback(lambda _: self._running.pop(repository, None))
        try:
            # A download that takes longer goes on, and is found in the cache when it is asked for again.
            folder = await asyncio.wait_for(asyncio.shield(running), self._limit_s)
        except UnusableModelFile as error:
            seconds = _SILENT_S if isinstance(error, _NoAnswer) else _REFUSED_S
            return _Known(error, self._clock() + seconds)
        except TimeoutError:
            late = _NoAnswer(f"{PREFIX}{repository}", f"it was not there after {self._limit_s:g} s", advice=_OWN_FILE)
            return _Known(late, self._clock() + _SILENT_S)
        return _Known(folder, float("inf"))


class _NoAnswer(UnusableModelFile):
    """Nothing is known of the repository, so that it is worth asking again."""


def repository_of(value: str) -> str | None:
    """The repository that a `tokenizer:` setting names as `hf:organisation/name`; None if it is something else."""
    return value.removeprefix(PREFIX) if value.startswith(PREFIX) else None


def is_repository(name: str) -> bool:
    """Whether a name can be one of a repository with an organisation."""
    return _REPOSITORY.fullmatch(name) is not None


def fetch_files(repository: str) -> Path:
    """The folder with the files of a repository, from the cache where they are in it: 0.5 s on, in this thread.

    Raises:
        UnusableModelFile: as `Hub.folder`.
    """
    # Takes 0.3 s, and is needed by nobody else here.
    from huggingface_hub import errors

    place = f"{PREFIX}{repository}"
    another = f"Write another repository (`tokenizer: {PREFIX}organisation/name`). {_OWN_FILE}"
    try:
        return _downloaded(repository)
    except UnusableModelFile:
        raise
    except errors.GatedRepoError as exc:
        advice = "Accept its terms on its page, and give the proxy a token of yours in HF_TOKEN."
        raise UnusableModelFile(place, "its owner wants to be asked first", advice=advice) from exc
    except errors.RepositoryNotFoundError as exc:
        raise UnusableModelFile(place, "there is no such repository, or it is private", advice=another) from exc
    except errors.LocalEntryNotFoundError as exc:
        raise _NoAnswer(place, "it is not in the cache, and nobody answers", advice=_OWN_FILE) from exc
    except errors.EntryNotFoundError as exc:
        raise UnusableModelFile(place, f"it has no {_TOKENIZER}", advice=another) from exc
    except Exception as exc:
        # Of httpx or requests, by the version of huggingface_hub, of the file system, or its own.
        raise _NoAnswer(place, f"it cannot be had ({type(exc).__name__})", advice=_OWN_FILE) from exc


def _downloaded(repository: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import disable_progress_bars

    cached = try_to_load_from_cache(repository, _TOKENIZER)
    if isinstance(cached, str):
        return Path(cached).parent
    disable_progress_bars()
    # Templates are in the one or in the other. The tokenizer comes last: where it is, all is there.
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        _fetch_beside(repository, name)
    return _fetch(repository, _TOKENIZER, _MAX_BYTES).parent


def _fetch_beside(repository: str, name: str) -> None:
    from huggingface_hub import errors

    try:
        _fetch(repository, name, _MAX_SIDE_BYTES)
    except errors.LocalEntryNotFoundError:
        raise
    except errors.EntryNotFoundError:
        return


def _fetch(repository: str, name: str, max_bytes: int) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    size = get_hf_file_metadata(hf_hub_url(repository, name), timeout=_ANSWER_S).size
    if size is None or size > max_bytes:
        problem = f"its {name} is larger than {max_bytes} bytes, or nobody says how large"
        raise UnusableModelFile(f"{PREFIX}{repository}", problem, advice=_OWN_FILE)
    return Path(hf_hub_download(repository, name, etag_timeout=_ANSWER_S))


def _in_thread(fetch: Callable[[str], Path], repository: str) -> asyncio.Future[Path]:
    """The result of a call in a thread for which nobody waits when the process ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Path] = loop.create_future()

    def settle(result: Path | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
            # Whoever waited may have gone.
            future.exception()
        elif result is not None:
            future.set_result(result)

    def run() -> None:
        result: Path | None = None
        error: Exception | None = None
        try:
            result = fetch(repository)
        except Exception as exc:  # noqa: BLE001 - raised again where it is waited for
            error = exc
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="tokenizer download", daemon=True).start()
    return future
