"""What a stock proxy sends and answers, recorded: a change of the code's structure must not change a byte of it."""
