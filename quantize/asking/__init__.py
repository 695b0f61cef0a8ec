"""Asking an installed engine: it loads the draft itself, and its linears are held to the folder.

`inside` runs in the engine's interpreter, which need not have draftquant.
"""
