"""Looks up what was said: an index of conversations in memory, its search, and the answer that a model reads."""

from litellm_compaction.recall.answer import BEGIN, END, NOT_KEPT, Beside, beside, found_fields, message_fields, told
from litellm_compaction.recall.hits import Found, search
from litellm_compaction.recall.index import Index
from litellm_compaction.recall.lookup import Lookup, indexed

__all__ = [
    "BEGIN",
    "END",
    "NOT_KEPT",
    "Beside",
    "Found",
    "Index",
    "Lookup",
    "beside",
    "found_fields",
    "indexed",
    "message_fields",
    "search",
    "told",
]
