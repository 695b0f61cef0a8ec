"""Tuning: finding the linears that may have few bits, by the accepted tokens that this costs."""
