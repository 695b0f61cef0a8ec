"""A run divided into shards, which any machine computes, and joined."""
