"""Which model is it, how large is its window, how many tokens does a request take."""
