"""A draft beside its target: whether they fit, in each engine, before any server is started."""
