"""Drafts whose head has rows for fewer tokens than the target's vocabulary."""
