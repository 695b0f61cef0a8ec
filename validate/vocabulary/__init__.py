"""What a head with fewer rows costs in accepted tokens, at every number of rows."""
