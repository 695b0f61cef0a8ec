"""Recording from a real vLLM, in this process or at a URL.

Only the engine loads `connector` and `scheduler`, by the names that `kept_recording` gives it.
"""
