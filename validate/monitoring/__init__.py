"""Sequential monitoring of a live draft: is its acceptance still golden?"""
