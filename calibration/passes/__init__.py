"""A draft's passes along traces: chains or blocks, several prompts together, on any device."""
