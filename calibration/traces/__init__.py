"""Traces (what a target did on prompts): the format, its files, and checks of their contents."""
