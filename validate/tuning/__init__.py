"""Tuning: which linears of a draft may be narrow, found by what it costs in accepted tokens."""
