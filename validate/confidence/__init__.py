"""What engines do with a draft's confidence head, and how far it can be trusted."""
