"""The acceptance of a quantized draft: what each step found, what was done, and one page of it."""
