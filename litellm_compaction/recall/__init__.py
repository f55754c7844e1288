"""Looks up what was said: an index of conversations in memory, its search, and the answer that a model reads."""

from litellm_compaction.recall.answer import recalled, written
from litellm_compaction.recall.hits import Found, Hit, Piece, search
from litellm_compaction.recall.index import Index, Original

__all__ = ["Found", "Hit", "Index", "Original", "Piece", "recalled", "search", "written"]
