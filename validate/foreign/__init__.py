"""Measurements by other tools' benchmarks: one module for each tool, and what all of them give."""
