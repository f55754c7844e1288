"""Which vocabulary and which chat template a model has, and the programs that count with them."""
