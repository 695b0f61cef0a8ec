"""Measurements by other tools' benchmarks: one module per tool, and their common result."""
