"""Where a draft says that it proposes fewer tokens than its target has.

So do EAGLE-3, DFlash and DSpark: SpecForge, ModelOpt, speculators, vLLM and SGLang.
"""

SIZE_KEY = "draft_vocab_size"
"""Of config.json, at its top level in every layout: the rows of the head."""
MAP = "d2t"
"""Canonical name of the table from draft ids to target ids, as offsets: target id - draft id."""
MASK = "t2d"
"""Canonical name of the table that marks the target ids which have a row."""
