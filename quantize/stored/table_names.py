"""The names that drafts use for the two tables that they may share with their target."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
