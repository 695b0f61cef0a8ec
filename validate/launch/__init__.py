"""Servers that are started, measured in turns and ended; how fast they were."""
