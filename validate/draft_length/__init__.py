"""How many tokens to draft: measured acceptance by their number, and the times of an estimate."""
