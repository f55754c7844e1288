"""The one orchestrator: counts, decides, asks, applies, stores, reports."""

from litellm_compaction.engine.additions import MOST_LOOKUPS as MOST_LOOKUPS
from litellm_compaction.engine.additions import RECALL as RECALL
from litellm_compaction.engine.compactor import Compactor as Compactor
from litellm_compaction.engine.context import Action as Action
from litellm_compaction.engine.context import Attempts as Attempts
from litellm_compaction.engine.context import CompactionNeeded as CompactionNeeded
from litellm_compaction.engine.context import ContinuationPlan as ContinuationPlan
from litellm_compaction.engine.context import Decided as Decided
from litellm_compaction.engine.context import PreparedRequest as PreparedRequest
from litellm_compaction.engine.context import PruningModel as PruningModel
from litellm_compaction.engine.context import RequestContext as RequestContext
from litellm_compaction.engine.servers import ALL_WAYS as ALL_WAYS
from litellm_compaction.engine.servers import KnownWays as KnownWays
from litellm_compaction.engine.servers import Outcome as Outcome
from litellm_compaction.engine.sharing.admission import TOLD_AFTER_S as TOLD_AFTER_S
from litellm_compaction.engine.sharing.reservation import Reservation as Reservation
