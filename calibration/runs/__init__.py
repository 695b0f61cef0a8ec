"""Runs of verbs that need traces, whole: `quantize` and `record`."""
