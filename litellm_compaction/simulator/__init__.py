"""A stand-in for LM Studio's local server, for tests and demonstrations.

It speaks LM Studio's HTTP API, and the protocol of its SDKs, with a real tokenizer, the loaded window, and every known
way of overflowing it. It imports nothing else of this project, so that it can witness the project's requests.
"""

from .catalog import Instance, Model
from .rendering import Tokenizer, count_by
from .script import (
    SDK_MODES,
    ChatCall,
    Fault,
    Gate,
    Reply,
    RequestRecord,
    Sdk,
    SdkCall,
    SdkMode,
    SdkSocket,
    numbered_words,
    summary_of_facts,
)
from .server import Address, serve
from .simulator import Simulator

__all__ = [
    "SDK_MODES",
    "Address",
    "ChatCall",
    "Fault",
    "Gate",
    "Instance",
    "Model",
    "Reply",
    "RequestRecord",
    "Sdk",
    "SdkCall",
    "SdkMode",
    "SdkSocket",
    "Simulator",
    "Tokenizer",
    "count_by",
    "numbered_words",
    "serve",
    "summary_of_facts",
]
