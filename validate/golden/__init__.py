"""What a draft accepts on given prompts: counts, and profiles for load tests."""
