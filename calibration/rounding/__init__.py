"""Learned rounding: codes and scales found along traces, by the gradient of the draft's output."""
