"""Settings of `vocab`."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from typing_extensions import override

from ...calibration.passes import Passes
from ...quantize.files.hub import Reference
from ...quantize.files.report_files import check_reports
from ...recipes.errors import ReplayError
from ...recipes.regular_file import AnyPath

USUAL_CONCURRENCY = (1,)
_OF_THE_CURVE = (
    "sizes", "judge", "gpus", "concurrency", "target_step_ms", "plot", "num_draft_tokens",
    "batch_size",
)  # fmt: skip


@dataclass(frozen=True)
class VocabRun(Passes):
    """For which draft, by which text, and how many rows; or the curve of all sizes."""

    draft: Reference
    traces: AnyPath
    _: KW_ONLY
    size: int | None = None
    coverage: float | None = None
    curve: bool = False
    out: AnyPath | None = None
    counts: AnyPath | None = None
    sizes: Sequence[int] = ()
    judge: AnyPath | None = None
    gpus: Sequence[str] = ()
    concurrency: Sequence[int] = USUAL_CONCURRENCY
    target_step_ms: str | float | None = None
    plot: AnyPath | None = None

    @override
    def check(self) -> None:
        for where, what, fix in self._faults():
            raise ReplayError(where, what, fix=fix)
        if self.plot is not None:
            check_reports({"plot": Path(self.plot)})

    def _faults(self) -> Iterator[tuple[str, str, str]]:
        if self.coverage is not None and not 0 < self.coverage <= 1:
            what = f"expected a share above 0, up to 1, got {self.coverage:g}"
            yield "--coverage", what, "for example 99.5%"
        if self.curve and self.out is not None:
            fix = "leave it out; then choose a size and write it: --size N --out FOLDER"
            yield "--out", "the curve writes no rows", fix
        if not self.curve and self.out is None:
            yield "--out", "is missing", "name the folder to create: --out FOLDER"
        unset = (None, (), USUAL_CONCURRENCY)
        stray = [name for name in _OF_THE_CURVE if getattr(self, name) not in unset]
        if stray and not self.curve:
            named = {"gpus": "--gpu"}.get(stray[0], f"--{stray[0].replace('_', '-')}")
            yield named, "is of use for the curve only", "leave it out, or ask for --curve"
        if self.draft_sampling != "greedy":
            what = (
                f"{self.draft_sampling} proposals are drawn from all rows of a head, so that their"
                " probabilities at every size are not known from one replay"
            )
            fix = "leave it out; replay the cut draft itself: draftquant replay"
            yield "--draft-sampling", what, fix
