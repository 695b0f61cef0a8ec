"""SGLang: the rules of 0.5.23, which its module in `versions` puts together.

A later version gets a module of its own there, and a module here for each rule that changed: it
names the old rules where they still hold.
"""
