"""Estimates from headers alone: what a draft step reads, how long it takes, whether that pays."""
