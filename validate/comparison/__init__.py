"""Several drafts on the same prompts: which one for which traffic, with simultaneous intervals."""
