"""Starting servers, measuring them in turns, stopping them, and comparing their speed."""
