"""Chosen rows of a draft's head, written: by `vocab`, and for `quantize`, which then reads them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..quantize.drafts import Draft
from ..quantize.files.hub import DraftSource, running_argv
from ..quantize.files.publish import SPARE_BYTES
from ..quantize.files.staging import check_output, staged_source
from ..quantize.inspection import open_draft
from ..quantize.making.preparing import check_source
from ..quantize.planning.quantization_plan import make_plan
from ..quantize.stored.stored_draft import StoredDraft
from ..quantize.vocabulary.cut_plan import plan_cut
from ..quantize.vocabulary.cut_vocabulary import VocabularyReport, cut_vocabulary
from ..recipes import Recipe
from ..recipes.listener import Listener
from .traces.trace_folder import TraceFolder
from .vocabulary_rows import Choosing, ChosenRows, choosing_of, chosen_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAsked:
    """Which rows.

    Attributes:
        coverage: share of held-out text that they cover, where no size is given.
        target: its folder, from whose head they come if the draft has none.
        options: what the names of the options for `size` and `coverage` begin with.
    """

    size: int | None
    coverage: float | None
    target: Path | None
    options: str = "--"

    def of(self, choosing: Choosing) -> ChosenRows:
        """The rows of a folder."""
        return chosen_rows(choosing, self.size, self.coverage, options=self.options)


def write_rows(
    choosing: Choosing,
    rows: ChosenRows,
    out: Path,
    asked: RowsAsked,
    *,
    listener: Listener,
    on_stage: Callable[[str], None],
) -> VocabularyReport:
    """Write the draft with these rows alone."""
    with listener.bar("cut", None, "bytes") as bar:
        return cut_vocabulary(
            choosing.source,
            out,
            target_ids=rows.target_ids,
            choice=choosing.record(rows, asked.size, asked.coverage),
            target=asked.target,
            argv=running_argv(),
            on_progress=bar.advance,
            on_stage=on_stage,
        )


@contextmanager
def with_chosen_rows(
    source: DraftSource,
    recipe: Recipe,
    out: Path,
    asked: RowsAsked,
    *,
    traces: Path,
    target_layers: int | None,
    listener: Listener,
) -> Iterator[tuple[DraftSource, Draft]]:
    """Give the draft with the rows that are asked for; it lies hidden beside the output.

    Nothing is written before it is known that the recipe fits it and the disk holds both folders.
    It is removed when the block is left.
    """
    check_output(out, source.folder)
    choosing = choosing_of(source, TraceFolder.open(traces), target=asked.target, counts=None)
    rows = asked.of(choosing)
    cut = plan_cut(StoredDraft.read(source.checkpoint()), rows.target_ids, asked.target)
    plan = make_plan(recipe, cut.result(), target_layers=target_layers)
    check_source(plan)
    needed = cut.bytes_after + plan.bytes_after + 2 * SPARE_BYTES
    check_output(out, source.folder, needed_bytes=needed)
    with staged_source(out) as folder:
        own = folder / source.folder.resolve().name  # the draft's name, which messages say
        written = write_rows(
            choosing, rows, own, asked, listener=listener, on_stage=lambda _stage: None
        )
        for warning in (*choosing.warnings_of(written.size), *written.warnings):
            listener.warning(warning)
        if rows.more_than_asked:
            listener.note(rows.more_than_asked)
        listener.note(_said(choosing, rows, written))
        yield open_draft(own)


def _said(choosing: Choosing, rows: ChosenRows, written: VocabularyReport) -> str:
    """What is quantized, in a line."""
    head = "" if written.head_from is None else f", of the target's {written.head_from}"
    return (
        f"vocabulary {written.size:,} of {written.vocabulary:,} ({written.size_before:,} rows"
        f" before{head}), chosen by {choosing.said}: they cover"
        f" {rows.held_out:.2%} of that text held out; this draft is quantized"
    )
