"""Recording from a real vLLM, in this process or behind a URL. Begin reading at `record`.

Only the engine loads `connector` and `scheduler`, by their names in `arguments`.
"""
