"""Continues an answer that was stopped: writes the request for it, and joins the new part of the reply."""
