"""Forward passes of a draft along traces: chains or blocks, several prompts at once, any device."""
