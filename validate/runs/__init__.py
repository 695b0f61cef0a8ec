"""What verbs run whole: each reads its inputs, calls the rooms below, and returns a result."""
