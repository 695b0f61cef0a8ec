"""Benchmarks of a clone: speed, memory, quality and error rates. Not in the wheel.

Each is a module that is run: `python -m benchmarks.quantize WORKDIR`.
"""
