"""How large a model's context really is, where that number comes from, and how old it is."""
