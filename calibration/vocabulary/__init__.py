"""Which tokens a draft's head needs rows for: what the target says, and the order of the rows."""
