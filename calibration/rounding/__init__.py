"""Learned rounding: quantized values and scales trained along traces on the draft's output."""
