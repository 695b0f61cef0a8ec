"""The maths of drafts: one module per kind of forward, over what `base` gives all of them."""
