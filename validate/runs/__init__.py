"""What verbs run whole: each reads what it was given, asks the rooms below, gives a result."""
