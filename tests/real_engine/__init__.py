"""A real llama.cpp with real weights behind LM Studio's listings, asked through a real proxy."""
