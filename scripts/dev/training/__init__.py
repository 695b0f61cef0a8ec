"""Training of the small target and draft pairs that ship with the tests, on CPU in minutes."""
