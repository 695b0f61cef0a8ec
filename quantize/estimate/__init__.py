"""Estimates from headers only: bytes and time of a draft step, and whether quantizing pays."""
