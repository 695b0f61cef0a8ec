"""What the linears of a draft read along traces: ranges, scales, second moments."""
