"""Judging what servers accepted: two measurements against each other, and against replay."""
