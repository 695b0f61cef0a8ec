"""Golden acceptance: what a draft accepts on given prompts, for load tests and for monitoring."""
