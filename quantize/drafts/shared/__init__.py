"""What several families share, in folders of the same shape as theirs."""
