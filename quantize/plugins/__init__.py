"""Plugins that an engine loads where draftquant is installed beside it.

Each imports its engine when the engine itself loads it; nothing else of draftquant imports them.
"""
