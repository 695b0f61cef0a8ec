"""Counting accepted tokens along recorded text, adding them by prompt, and bounding a change."""
