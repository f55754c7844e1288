"""Looks up what was said: an index of conversations in memory, its search, and the answer that a model reads."""

from litellm_compaction.recall.answer import NOT_KEPT, found_fields, message_fields, shown_to_people, told, written
from litellm_compaction.recall.beside import BEGIN, END, Beside, beside
from litellm_compaction.recall.hits import Found, Hit, Piece, QueryTooLong, checked, search
from litellm_compaction.recall.index import Index, Original
from litellm_compaction.recall.lookup import KeptStretch, Lookup, indexed

__all__ = [
    "BEGIN",
    "END",
    "NOT_KEPT",
    "Beside",
    "Found",
    "Hit",
    "Index",
    "KeptStretch",
    "Lookup",
    "Original",
    "Piece",
    "QueryTooLong",
    "beside",
    "checked",
    "found_fields",
    "indexed",
    "message_fields",
    "search",
    "shown_to_people",
    "told",
    "written",
]
