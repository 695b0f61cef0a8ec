"""Predicting what an engine will do with a draft folder, without starting a server.

`engine_check` reads config.json and the headers of the tensors, and applies the rules of one
version of one engine. It runs no engine, needs no GPU and imports no torch.
"""
