"""Compaction for agent loops without our proxy: a facade over the engine; messages in, messages out; no LiteLLM."""
