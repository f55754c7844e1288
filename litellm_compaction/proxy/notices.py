"""Where a client is told of compactions: in its answer's text, in its thoughts, or not in the stream at all.

Asked by the gate for each answer. A line in the text is for people who read it; a program takes it for the model's
words. Measured with twenty clients on 2026-11-22: one committed it into a source file, one took it for the agent's
result, several parsed no JSON any more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from litellm_compaction.core.messages import lead_length
from litellm_compaction.engine import Pending
from litellm_compaction.proxy.guards import metadata_of

logger = logging.getLogger("litellm_compaction")

Place: TypeAlias = Literal["content", "reasoning", "off"]
Choice: TypeAlias = Literal["auto", "content", "reasoning", "off"]

# Open WebUI forwards who is logged in, by headers of these names, where ENABLE_FORWARD_USER_INFO_HEADERS is on.
_CHAT_HEADER_PREFIX = "x-openwebui-"
# Every browser begins so; Electron's programs too, of which many are editors with an agent inside.
_BROWSER_PREFIX, _NO_BROWSER = "mozilla/", "electron/"
# Routes on which thoughts are a delta of their own. LiteLLM makes a malformed item of them on responses (1.106.2 and
# 1.109.1), and text completions have none.
_ROUTES_WITH_THOUGHTS = ("/chat/completions", "/messages")
_OWNERS = ("user_api_key_metadata", "user_api_key_team_metadata")
_MAX_REMEMBERED = 4096


class Notices(NamedTuple):
    """Where notices go in one answer.

    Attributes:
        before: while nothing of the answer has been sent.
        within: behind its beginning. The seam can lie in a code block, a diff or JSON.
    """

    before: Place
    within: Place


SILENT = Notices("off", "off")


def notices_for(configured: Choice, body: Mapping[str, Any]) -> Notices:
    """Where the client behind a request is told.

    Args:
        configured: the setting in force for the deployment.
        body: of the request, with LiteLLM's metadata and `proxy_server_request`.
    """
    metadata = metadata_of(body)
    chosen = _chosen_for_owner(metadata) or configured
    if chosen != "auto":
        return Notices(chosen, chosen)
    if shows_text_to_people(_headers(body)):
        return Notices("content", "content")
    route = str(metadata.get("user_api_key_request_route") or "")
    # LiteLLM's own option writes thoughts into the text.
    has_thoughts = route.endswith(_ROUTES_WITH_THOUGHTS) and not body.get("merge_reasoning_content_in_choices")
    return Notices("reasoning" if has_thoughts else "off", "off")


def shows_text_to_people(headers: Mapping[str, Any]) -> bool:
    """Whether a client says that a person reads its answers as they are; when in doubt it is a program."""
    for name, value in headers.items():
        if name.lower().startswith(_CHAT_HEADER_PREFIX):
            return True
        if name.lower() == "user-agent":
            agent = str(value).lower()
            if agent.startswith(_BROWSER_PREFIX) and _NO_BROWSER not in agent:
                return True
    return False


class Announced:
    """Which requests were compacted, so that the next of the same conversation does not tell it again.

    Where system and tools take nearly the whole target, every turn is compacted: one notice says that, seven are noise.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    def is_next_in_a_row(self, pending: Pending) -> bool:
        """Whether the request before this one of its conversation was compacted, too; remembers this one."""
        scope, conversation = pending.work.case.scope, pending.work.conversation
        roles = [message.role for message in conversation.messages[lead_length(conversation.messages) :]]
        if not roles:
            return False
        self._known[scope, conversation.hashes[-1]] = None
        self._known.move_to_end((scope, conversation.hashes[-1]))
        while len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
        # What came before the newest answer is what was asked for it.
        answer = next((at for at in range(len(roles) - 1, -1, -1) if roles[at] == "assistant"), 0)
        return answer > 0 and (scope, conversation.hashes[answer]) in self._known


def _chosen_for_owner(metadata: Mapping[str, Any]) -> Choice | None:
    """What the operator has written for the key, else for its team: `{"compaction": {"notices": "content"}}`."""
    for owner in _OWNERS:
        written = metadata.get(owner)
        section = written.get("compaction") if isinstance(written, Mapping) else None
        choice = section.get("notices") if isinstance(section, Mapping) else None
        if choice is False:
            return "off"
        for known in get_args(Choice):
            if choice == known:
                found: Choice = known
                return found
        if choice is not None:
            logger.warning("notices of a key or team are not one of %s; the setting holds", ", ".join(get_args(Choice)))
    return None


def _headers(body: Mapping[str, Any]) -> Mapping[str, Any]:
    request = body.get("proxy_server_request")
    headers = request.get("headers") if isinstance(request, Mapping) else None
    return headers if isinstance(headers, Mapping) else {}
