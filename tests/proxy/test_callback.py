"""A proxy that ends in order: what it had not written is written, and what others would wait for is given back.

In the middle of streams: `tests/processes/test_fleet.py`.
"""

from __future__ import annotations
