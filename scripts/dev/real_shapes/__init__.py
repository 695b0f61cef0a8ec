"""Published drafts as config.json and shapes, and drafts of these shapes with random weights."""
