"""A simulated LM Studio, for `up` without one and for `demo`: its HTTP API, a real tokenizer, and the loaded window.

A prompt that is too long is cut silently, as LM Studio does. It imports nothing else of this project, so that it can
witness the project's requests.
"""

from .rendering import count_by
from .server import serve
from .simulator import ChatCall, Model, Reply, RequestRecord, Simulator

__all__ = ["ChatCall", "Model", "Reply", "RequestRecord", "Simulator", "count_by", "serve"]
