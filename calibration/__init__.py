"""Traces of a target, and what is measured of a draft along them before it is quantized."""
