"""Chosen rows of a draft's head, written: by `vocab`, and for `quantize`, which then reads them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.command_line import running_argv
from ...quantize.files.hub import DraftSource
from ...quantize.files.publish import SPARE_BYTES
from ...quantize.files.staging import check_output, staged_source
from ...recipes.bounds import AT_LEAST_1, SHARE_OR_ALL
from .arguments import share
from .option import Option
from .references import optional_path
from .settings import SettingsError
from .watch import Watch

if TYPE_CHECKING:
    from ...calibration.vocabulary.choosing import Choosing, ChosenRows
    from ...quantize.drafts import Draft
    from ...quantize.vocabulary.cut_vocabulary import VocabularyReport
    from ...recipes import Recipe
    from .quantize import QuantizeSettings


VocabSize = Annotated[
    int | None,
    Option(
        "cut the head's vocabulary first: keep so many rows, chosen by --traces as 'draftquant"
        " vocab' chooses them",
        "ROWS",
        bounds=AT_LEAST_1,
    ),
]
VocabCoverage = Annotated[
    float | None,
    Option(
        "the same, but as many rows as cover this share of the tokens of held-out text, such as"
        " 99.5%%",
        "SHARE",
        reads=share,
        bounds=SHARE_OR_ALL,
        fix="for example 99.5%",
    ),
]


def rows_chosen(
    choosing: "Choosing", size: int | None, coverage: float | None, *, options: str = "--"
) -> "ChosenRows":
    """The rows of a folder; `options` is what the names of the two options begin with.

    Raises:
        CalibrationError: the draft takes no folder, or no cut of it is as asked.
    """
    from ...calibration.vocabulary.choosing import check_takes_folder, chosen_rows

    check_takes_folder(choosing)
    return chosen_rows(choosing, size, coverage, options=options)


def write_rows(
    choosing: "Choosing",
    rows: "ChosenRows",
    out: Path,
    *,
    size: int | None,
    coverage: float | None,
    target: Path | None,
    watch: Watch,
    on_stage: Callable[[str], None],
) -> "VocabularyReport":
    """Write the draft with these rows alone."""
    from ...quantize.vocabulary.cut_vocabulary import cut_vocabulary

    with watch.bar("cut", None, "bytes") as bar:
        return cut_vocabulary(
            choosing.source,
            out,
            target_ids=rows.target_ids,
            choice=choosing.record(rows, size, coverage),
            target=target,
            argv=running_argv(),
            on_progress=bar.advance,
            on_stage=on_stage,
        )


def check_rows(settings: "QuantizeSettings") -> None:
    """Refuse to choose rows by nothing.

    Raises:
        SettingsError: there are no traces.
    """
    if settings.cuts_rows and settings.traces is None:
        raise SettingsError(
            "--vocab-size" if settings.vocab_coverage is None else "--vocab-coverage",
            "rows are chosen by what the target says in recorded traces, also where the recipe"
            " needs none, and there are none",
            fix="give traces of other prompts than the gate's: --traces TRACES",
        )


@contextmanager
def with_chosen_rows(
    source: DraftSource, recipe: "Recipe", settings: "QuantizeSettings"
) -> "Iterator[tuple[DraftSource, Draft, VocabularyReport]]":
    """Give the draft with the rows that `quantize` is asked for; it lies beside the output.

    Nothing is written before it is known that the recipe fits it and the disk holds both folders.
    It is removed when the block is left.
    """
    from ...calibration.traces.trace_folder import TraceFolder
    from ...calibration.vocabulary.choosing import choosing_of
    from ...quantize.checks import check_source
    from ...quantize.quantization_plan import make_plan
    from ...quantize.stored.stored_draft import StoredDraft
    from ...quantize.vocabulary.cut_plan import plan_cut
    from .opening import open_draft

    out, target, watch = Path(settings.out), optional_path(settings.target), settings.watch
    check_output(out, source.folder)
    size, coverage = settings.vocab_size, settings.vocab_coverage
    traces = TraceFolder.open(Path(settings.traces or ""))
    choosing = choosing_of(source, traces, target=target, counts=None)
    rows = rows_chosen(choosing, size, coverage, options="--vocab-")
    cut = plan_cut(StoredDraft.read(source.checkpoint()), rows.target_ids, target)
    plan = make_plan(recipe, cut.result(), target_layers=settings.target_layers)
    check_source(plan)
    needed = cut.bytes_after + plan.bytes_after + 2 * SPARE_BYTES
    check_output(out, source.folder, needed_bytes=needed)
    for warning in choosing.warnings:
        watch.warning(warning)
    watch.stage("cut")
    with staged_source(out) as folder:
        # by its own name, which messages say
        written = write_rows(
            choosing,
            rows,
            folder / source.folder.resolve().name,
            size=size,
            coverage=coverage,
            target=target,
            watch=watch,
            on_stage=lambda _stage: None,
        )
        for warning in written.warnings:
            watch.warning(warning)
        watch.note(
            f"vocabulary {written.size:,} of {written.vocabulary:,}"
            f" ({written.size_before:,} rows before), chosen by {len(choosing.texts):,} prompts:"
            f" they cover {rows.held_out:.2%} of that text held out; this draft is quantized"
        )
        watch.stage("")
        yield *open_draft(written.out), replace(written, out=out)
