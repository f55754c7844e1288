"""The one orchestrator: counts, decides, asks, applies, stores, reports."""

from litellm_compaction.engine.additions import MOST_LOOKUPS, RECALL
from litellm_compaction.engine.compactor import Compactor
from litellm_compaction.engine.context import (
    Action,
    Attempts,
    CompactionNeeded,
    ContinuationPlan,
    PreparedRequest,
    PruningModel,
    RequestContext,
)
from litellm_compaction.engine.context import Decided as Foreseen
from litellm_compaction.engine.servers import ALL_WAYS, KnownWays, Outcome
from litellm_compaction.engine.sharing.admission import TOLD_AFTER_S
from litellm_compaction.engine.sharing.reservation import Reservation

__all__ = [
    "ALL_WAYS",
    "MOST_LOOKUPS",
    "RECALL",
    "TOLD_AFTER_S",
    "Action",
    "Attempts",
    "CompactionNeeded",
    "Compactor",
    "ContinuationPlan",
    "Foreseen",
    "KnownWays",
    "Outcome",
    "PreparedRequest",
    "PruningModel",
    "RequestContext",
    "Reservation",
]
