"""The context length that LM Studio has really loaded a model with, for `CompactionConfig.context_window_tokens`."""

from __future__ import annotations

import httpx

from litellm_compaction.errors import ModelNotLoaded, WindowUnknown, WindowUnread
from litellm_compaction.windows.windows import Target, Windows

# A client made here lives for one question; nothing is read a second time.
_CACHE_S = 60.0


async def loaded_window(
    model: str, *, api_base: str, api_key: str | None = None, http: httpx.AsyncClient | None = None
) -> int:
    """Tokens of context that a model of LM Studio's is loaded with, as its own API says now (`/api/v1/models`).

    Args:
        model: as LM Studio lists it, without a provider's prefix.
        api_base: of the server, such as `http://127.0.0.1:1234/v1`.
        api_key: for a server that asks for one.
        http: the client to use; None makes one.

    Raises:
        WindowUnknown: the server does not answer, does not list the model, or has not loaded it; says what to change.
    """
    target = Target(key=model, model=model, api_base=api_base, api_key=api_key, context_length=None)
    windows = Windows(cache_s=_CACHE_S, http=http)
    try:
        return (await windows.resolve(target)).tokens
    except ModelNotLoaded as error:
        tried = f"LM Studio has not loaded it; load it (`lms load {model}`) and ask again"
        raise WindowUnknown(model, tried=tried) from error
    except WindowUnread as error:
        tried = "its server does not answer; start it (`lms server start`) or correct `api_base`"
        raise WindowUnknown(model, tried=tried) from error
    except WindowUnknown as error:
        tried = "LM Studio names no context length of it; correct `model` (`lms ps` lists what is loaded) or `api_base`"
        raise WindowUnknown(model, tried=tried) from error
    finally:
        await windows.aclose()
