"""The Python API: a function for each verb that matters, which the command of its name calls."""
