"""Code that several families share, in folders with the same modules as theirs."""
