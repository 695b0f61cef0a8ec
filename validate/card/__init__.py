"""The model card of a quantized draft: what it is, what was measured of it, and what was not."""
