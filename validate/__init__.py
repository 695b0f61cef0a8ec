"""Deciding whether a quantized draft is as good as its baseline: replay, statistics, gate."""
