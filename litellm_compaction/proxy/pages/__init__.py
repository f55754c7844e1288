"""The settings and history page: `routes.py` serves it, `overview.py` gathers, `document.py` and its parts draw."""

from litellm_compaction.proxy.pages.overview import Surroundings
from litellm_compaction.proxy.pages.routes import add_page

__all__ = ["Surroundings", "add_page"]
