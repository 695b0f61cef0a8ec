"""Prompts as users have them."""
