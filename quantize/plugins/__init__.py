"""Plugins that an engine loads if draftquant is installed beside it.

Each imports its engine when the engine loads it. No other module of draftquant imports a plugin.
"""
