"""Going on with an answer that was stopped: the request for it, and what of the reply is new."""
