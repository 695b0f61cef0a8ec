"""The model card of a quantized draft: what it is, what was measured, and what was not."""
