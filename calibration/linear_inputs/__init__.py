"""Inputs of the linears of a draft along traces: ranges, scales, second moments."""
