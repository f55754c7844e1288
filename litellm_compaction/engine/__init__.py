"""The one orchestrator: counts, decides, asks, applies, stores, reports."""

from litellm_compaction.engine.admission import Room, shares_context
from litellm_compaction.engine.compactor import Compactor
from litellm_compaction.engine.context import Action, Attempts, Case, Guarded, Measure, Pending, Prospect, PruningModel
from litellm_compaction.engine.going_on import ALL_WAYS, GoingOn, Outcome, Standing

__all__ = [
    "ALL_WAYS",
    "Action",
    "Attempts",
    "Case",
    "Compactor",
    "GoingOn",
    "Guarded",
    "Measure",
    "Outcome",
    "Pending",
    "Prospect",
    "PruningModel",
    "Room",
    "Standing",
    "shares_context",
]
