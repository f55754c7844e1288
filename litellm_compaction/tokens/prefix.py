"""What servers counted for prompts that later requests begin with: prefix anchors.

Called by `counter.py`. An anchor absorbs whatever a server adds to prompts, for any model, known or not: only the new
messages are an estimate (measured 2026-11: 0.1 % median error on agent sessions, against 1–2 % by calibration alone).
Conversations are not kept here: an anchor is a hash and four numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.tokens.calibration import Mix
from litellm_compaction.tokens.growth import Profile

# About 300 bytes each.
_MAX_ANCHORS = 16_384

# One per number of messages, none included. Hashes of this process: 64 bit, seeded, and cached by the interpreter in
# each string, so that the second hook that counts a request gets them for nothing.
Fingerprints: TypeAlias = tuple[int, ...]


class Anchor(NamedTuple):
    """What a server counted for a prompt, and what we did.

    Attributes:
        prompt_tokens: the server's number.
        raw_tokens: ours, before calibration.
        mix: what the prompt consists of.
        profile: likewise, where a stand-in counted it.
        role: of its last message: some templates leave out a part of the prompt that depends on it (Mistral Nemo's
            and v3's the system message, where the last one is a tool's).
        media_tokens: the part of `raw_tokens` that images, sound and pages take.
        is_sure: the server was asked for the number, which holds however far it is from ours.
    """

    prompt_tokens: int
    raw_tokens: float
    mix: Mix
    profile: Profile | None = None
    role: str = ""
    media_tokens: float = 0.0
    is_sure: bool = False

    @property
    def text_tokens(self) -> float:
        """The other part of `raw_tokens`."""
        return self.raw_tokens - self.media_tokens

    def new_mix(self, raw_tokens: float, mix: Mix) -> Mix:
        """What the rest of a longer prompt consists of, from its own size and mix."""
        new_tokens = raw_tokens - self.raw_tokens
        if new_tokens <= 0:
            return mix
        return Mix(
            *(
                min(1.0, max(0.0, (whole * raw_tokens - old * self.raw_tokens) / new_tokens))
                for whole, old in zip(mix, self.mix, strict=True)
            )
        )


class Anchors:
    """The newest anchors of all deployments; used between two awaits only, so it needs no lock."""

    def __init__(self) -> None:
        self._entries: Bounded[tuple[str, str, int], Anchor] = Bounded(_MAX_ANCHORS)

    def note(self, target_key: str, basis: str, fingerprint: int, anchor: Anchor) -> None:
        """Remembers a prompt's true count.

        Args:
            target_key: the deployment.
            basis: how `raw_tokens` were counted; other ways of counting cannot be compared with it.
            fingerprint: of the whole prompt, the last one of its request's.
            anchor: a second number for the same prompt stands only where it is higher, or the server was asked for
                it: some servers leave out what was in their cache.
        """
        key = (target_key, basis, fingerprint)
        known = self._entries.get(key)
        if known is None or known.prompt_tokens < anchor.prompt_tokens or anchor.is_sure:
            self._entries[key] = anchor
        else:
            self._entries.move_to_end(key)

    def find(self, target_key: str, basis: str, prints: Fingerprints, *, role: str | None = None) -> Anchor | None:
        """The longest known prompt that a request begins with, the whole of it included.

        Args:
            target_key: the deployment.
            basis: how the request was counted.
            prints: the request's.
            role: of the prompt's last message; None for any.
        """
        for fingerprint in reversed(prints[1:]):
            key = (target_key, basis, fingerprint)
            found = self._entries.get(key)
            if found is not None and role in (None, found.role):
                self._entries.move_to_end(key)
                return found
        return None


def fingerprints(request: Request) -> Fingerprints:
    """Entry i stands for the first i messages, to the letter, with the request's tools and extras.

    About 0.5 ms per new MB. Empty where the request cannot be written as JSON.
    """
    try:
        beside = [request.tools, request.tool_choice, *([request.extras] if request.extras else [])]
        entry = hash((json.dumps(beside),))
        entries = [entry]
        for message in request.messages:
            entry = hash((entry, *_content(message)))
            entries.append(entry)
    except (RecursionError, TypeError, ValueError):
        return ()
    return tuple(entries)


def _content(message: Message) -> Sequence[str]:
    """All of a message, its text without a copy where it is plain."""
    content = message.raw.get("content")
    if not isinstance(content, str):
        return (json.dumps(message.raw),)
    if len(message.raw) == 2:
        return message.role, content
    return content, json.dumps({key: value for key, value in message.raw.items() if key != "content"})
