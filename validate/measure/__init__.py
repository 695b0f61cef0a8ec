"""Measuring what servers accept and write, and how long it takes, request by request."""
