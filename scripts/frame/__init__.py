"""The Python API: one function per verb, which the command of the same name calls."""
