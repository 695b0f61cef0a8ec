"""Hidden states that trainers dumped: readers of their layouts, and what makes traces of them.

A reader gives `Sample`s: tokens, answers as the dump marks them, aux features, and the last hidden
state. Three facts are verified, not taken from the dump: the layers, whether the norm was applied,
and the token of each row. `head`, `recomputed`, `whole_texts` and `draft_steps` hold the evidence.
"""
