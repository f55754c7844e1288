"""A stand-in for LM Studio's local server, for tests and demonstrations.

It speaks LM Studio's HTTP API with a real tokenizer, the loaded window, and every known way of overflowing
it. It imports nothing else of this project, so that it can witness what the project sends.
"""

from litellm_compaction.simulator.script import RequestRecord

from .catalog import Instance, Model
from .script import ChatCall, Fault, Gate, Reply, numbered_words, summary_of_facts
from .server import Address, serve
from .simulator import Simulator

__all__ = [
    "Address",
    "ChatCall",
    "Fault",
    "Gate",
    "Instance",
    "Model",
    "Reply",
    "RequestRecord",
    "Simulator",
    "numbered_words",
    "serve",
    "summary_of_facts",
]
