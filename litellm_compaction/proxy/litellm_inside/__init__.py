"""All that we touch of LiteLLM's inside; everybody else uses what it documents. `seam.py` has the list."""
