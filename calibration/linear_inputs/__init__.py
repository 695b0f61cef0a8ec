"""Inputs of the linears of a draft along traces: scales, second moments."""
