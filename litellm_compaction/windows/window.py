"""The context length that a deployment's model is loaded with, and what its server's listing says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

# LM Studio's API (`api/v1`, `api/v0`), a name in `SERVERS`, the operator's number (`operator`, `max_input_tokens`),
# a `default`, or `learned` of an overflow error.
Source: TypeAlias = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The context length to stay inside.

    Attributes:
        instance_id: the loaded copy that the number belongs to; the model's name when LM Studio was not asked.
        architecture: as LM Studio names it; "" when it was not asked.
        parallel: requests that share `tokens` at the same time.
        slots: requests that have `tokens` each at the same time, as llama.cpp's server says; older ones do not say
            whether they share a unified cache.
        adds_bos: False if a raw prompt needs the token that begins every prompt. llama.cpp adds it to a completion's
            text (`tokenize_input_prompts`), LM Studio's MLX engine takes the text as it is (mlx-engine 017af0e,
            `BatchedModelKit.tokenize`). Without it models such as Gemma write nonsense.
        load: grows if the model is loaded anew, maybe as another one of its name that counts otherwise.
    """

    tokens: int
    source: Source
    instance_id: str
    architecture: str = ""
    parallel: int = 1
    slots: int = 1
    adds_bos: bool = True
    load: int = 0


class Found(NamedTuple):
    """A listing's word on one model: its window, or why it gives none."""

    window: Window | None
    absence: str = ""
    is_unloaded: bool = False


class Listing(Protocol):
    """A server's models, as it has just told them; equal to no other."""

    def find(self, model: str) -> Found:
        """The window of the loaded copy that a request for `model` reaches."""

    @property
    def chats(self) -> Mapping[str, bool]:
        """The chat models by the names that requests have for them, and if each is loaded."""
