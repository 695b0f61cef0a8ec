"""Hidden states that trainers dumped, and what makes traces of them.

`dump_layouts` reads them. Three facts are measured, not taken from the dump: the layers, whether
the norm was applied, and the token of each row (`dump_answers`, `dump_evidence`).
"""

from typing import Literal

DumpFormat = Literal["specforge", "torchspec", "speculators", "modelopt", "angelslim", "vllm"]
"""Who writes a dump; `dump_layouts.LAYOUTS` has a row for each."""
