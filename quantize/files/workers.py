"""How many threads read, compute and write at once."""

import os

_MOST = 8
"""More would wait for memory; and each holds some blocks of rows, about 20 MB."""

WORKERS = max(1, min(_MOST, len(os.sched_getaffinity(0))))
"""Of the cores that this process may use. Kernels, torch and numpy release the interpreter lock."""
