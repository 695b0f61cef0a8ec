"""Hidden states that trainers dumped, and their conversion to traces.

`dump_layouts` reads them. Three facts are measured rather than taken from the dump: the layers,
whether the norm was applied, and the token of each row (`dump_answers`, `dump_evidence`).
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from typing_extensions import override

from ...quantize.files.hub import Reference
from ...recipes.errors import TraceError
from ...recipes.listener import Heard
from ...recipes.regular_file import AnyPath

DumpFormat = Literal["specforge", "torchspec", "speculators", "modelopt", "angelslim", "vllm"]
"""Who writes a dump; `dump_layouts.LAYOUTS` has a row for each."""


@dataclass(frozen=True)
class DumpImport(Heard):
    """Which dump of which target, and how to read it."""

    dump: AnyPath
    target: AnyPath
    out: AnyPath
    _: KW_ONLY
    written_by: DumpFormat
    draft: Reference | None = None
    aux_layer_ids: Sequence[int] | None = None
    prompts: AnyPath | None = None
    greedy: bool = False
    leave_out_off_policy: bool = False
    tables: bool = False
    table_ids: Sequence[int] = ()

    @override
    def check(self) -> None:
        if self.table_ids and not self.tables:
            raise TraceError("--table-ids", "says which rows the tables carry", fix="add --tables")
