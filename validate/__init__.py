"""Whether a quantized draft is as good as its baseline: replay, statistics, policy and gate."""
