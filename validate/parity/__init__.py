"""Whether speculation changes what a target says: texts, scores, probabilities, proposals."""
