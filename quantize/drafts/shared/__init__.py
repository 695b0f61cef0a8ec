"""Code that several families share; the folders have the same modules as theirs."""
