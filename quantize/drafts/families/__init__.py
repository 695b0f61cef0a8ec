"""One folder per draft family: `names`, and `geometry` and `forward` where they are its own.

`names.FAMILY` is all that makes a family known. Importing `names` or `geometry` imports no torch.
"""
