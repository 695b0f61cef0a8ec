"""Traces of a target, and what a draft computes along them before it is quantized."""
