"""The edge to LiteLLM: hooks, request shapes, routing. Only here (and in `cli`) is LiteLLM imported."""
