"""A recurrent drafter, as a new family would be written: these four files are all of it."""
