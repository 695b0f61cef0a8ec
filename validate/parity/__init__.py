"""Whether speculation changes the target's output: texts, scores, probabilities, proposals."""
