"""A double of LM Studio's local server for tests: the simulator, with every known way of overflowing its window.

It adds to the simulator's application the protocol of LM Studio's SDKs, older versions, llama.cpp's faces, and faults.
"""

from litellm_compaction.simulator.server import Address
from litellm_compaction.simulator.simulator import ChatCall, RequestRecord

from .catalog import Model
from .script import SDK_MODES, Fault, Gate, Reply, SdkMode, numbered_words, summary_of_facts
from .server import serve
from .simulator import Simulator

__all__ = [
    "SDK_MODES",
    "Address",
    "ChatCall",
    "Fault",
    "Gate",
    "Model",
    "Reply",
    "RequestRecord",
    "SdkMode",
    "Simulator",
    "numbered_words",
    "serve",
    "summary_of_facts",
]
