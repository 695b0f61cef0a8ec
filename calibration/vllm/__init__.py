"""Recording from a real vLLM, in this process or served. `record` is where to begin.

`connector` and `scheduler` are loaded by the engine alone, by their names in `arguments`.
"""
