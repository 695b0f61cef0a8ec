"""What the maths and the shapes of drafts follow from: frozen numbers, read from config.json."""
