"""A draft beside its target: whether the two fit, in each engine, before any server is started."""
