"""`vocab`: rows of a draft's head, chosen by what its target says; written, or judged by size."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.hub import resolve_draft
from ...quantize.files.report_files import check_reports, write_reports
from ...quantize.files.staging import check_output
from ...recipes.bounds import AT_LEAST_1
from . import arguments, reports
from .arguments import AnyPath, share
from .cut_rows import RowsAsked, write_rows
from .loaded_drafts import PassesSettings, load_for_replay
from .opened_traces import open_traces
from .option import Option
from .references import optional_path
from .verb import verb

if TYPE_CHECKING:
    from ...calibration.vocabulary.choosing import Choosing
    from ...quantize.estimate.work import Machine
    from ...validate.vocabulary.size_curve import SizeCurve
    from ...validate.vocabulary.size_estimate import SizeEstimate
    from ...validate.vocabulary.step_times import StepTimes
    from ...validate.vocabulary.vocab_report import VocabReport

USUAL_GPU = "h200"
USUAL_EFFICIENCY = 0.75
"""As of `estimate`."""
_USUAL_CONCURRENCY = (1,)
_OF_THE_CURVE = (
    "sizes", "judge", "gpus", "concurrency", "target_step_ms", "plot", "num_draft_tokens",
    "batch_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VocabSettings(PassesSettings):
    """Of which draft, by which text, and how many rows; or the curve of all sizes."""

    draft: arguments.Draft
    traces: Annotated[
        AnyPath,
        Option("traces whose text chooses the rows; do not use the gate's traces", "TRACES"),
    ]
    _: KW_ONLY
    size: Annotated[int | None, Option("rows to keep", "ROWS", bounds=AT_LEAST_1)] = None
    coverage: Annotated[
        float | None,
        Option(
            "keep as many rows as cover this share of the tokens of held-out text, such as 99.5%%",
            "SHARE",
            reads=share,
        ),
    ] = None
    curve: Annotated[
        bool,
        Option("write no folder; show coverage, acceptance and speed by the number of rows"),
    ] = False
    out: Annotated[AnyPath | None, Option("folder to create", "FOLDER")] = None
    counts: Annotated[
        AnyPath | None,
        Option(
            "how often each token stands in other text: a JSON array, which orders the tokens that"
            " the target never said",
            "FILE.json",
        ),
    ] = None
    sizes: Annotated[
        Sequence[int],
        Option(
            "numbers of rows of the curve (default: 8192,16384,32768,65536, or halves of a small"
            " vocabulary)",
            "ROWS,...",
            several="commas",
            bounds=AT_LEAST_1,
        ),
    ] = ()
    judge: Annotated[
        AnyPath | None,
        Option(
            "traces of other prompts, which judge the curve (default: those of --traces, each part"
            " judged by rows that the others choose)",
            "TRACES",
        ),
    ] = None
    gpus: Annotated[
        Sequence[str],
        Option(
            "GPU that the curve's speed is estimated for, may be repeated (default: h200)",
            "GPU",
            flag="--gpu",
            several="repeated",
        ),
    ] = ()
    concurrency: Annotated[
        Sequence[int],
        Option(
            "concurrent sequences that it is estimated for (default: 1)",
            "SEQUENCES,...",
            several="commas",
        ),
    ] = _USUAL_CONCURRENCY
    target_step_ms: Annotated[
        str | float | None,
        Option(
            "measured time of the target's verify step in ms: 14.2, or by concurrency"
            " 1=9.5,8=14.2,64=38; says which size is the fastest",
            "MILLISECONDS",
        ),
    ] = None
    plot: Annotated[AnyPath | None, Option("draw the curve", "F.svg")] = None

    one_of = (("size", "coverage", "curve"),)

    def check(self) -> None:
        """Refuse what does not go with a folder, or with the curve; and sampled proposals."""
        from ...validate.errors import ReplayError

        if self.coverage is not None and not 0 < self.coverage <= 1:
            raise ReplayError(
                "--coverage",
                f"expected a share above 0, up to 1, got {self.coverage:g}",
                fix="for example 99.5%",
            )
        if self.curve and self.out is not None:
            raise ReplayError(
                "--out",
                "the curve writes no rows",
                fix="leave it out; then choose a size and write it: --size N --out FOLDER",
            )
        if not self.curve and self.out is None:
            raise ReplayError("--out", "is missing", fix="name the folder to create: --out FOLDER")
        unset = (None, (), _USUAL_CONCURRENCY)
        stray = [name for name in _OF_THE_CURVE if getattr(self, name) not in unset]
        if stray and not self.curve:
            named = {"gpus": "--gpu"}.get(stray[0], f"--{stray[0].replace('_', '-')}")
            raise ReplayError(
                named, "is of use for the curve only", fix="leave it out, or ask for --curve"
            )
        if self.draft_sampling != "greedy":
            raise ReplayError(
                "--draft-sampling",
                f"{self.draft_sampling} proposals are drawn from all rows of a head, so that their"
                " probabilities at every size are not known from one replay",
                fix="leave it out; replay the cut draft itself: draftquant replay",
            )
        if self.plot is not None:
            check_reports({"plot": Path(self.plot)})


@verb(VocabSettings)
def vocab(settings: VocabSettings) -> "reports.VocabReport":
    """Cut a draft's head to the tokens that its target says, or find out how many it needs.

    With `curve=True` nothing is written: one replay gives the acceptance length at every size, with
    rows chosen by other prompts than those that judge it.

    Returns:
        The rows that were kept, what they cover of held-out text and what was written; or the
        curve.

    Raises:
        DraftQuantError: the draft, the traces or the counts cannot be read, do not belong together,
            or the vocabulary of such a draft cannot be cut.
    """
    from ...calibration.vocabulary.choosing import choosing_of

    if settings.out is not None:
        check_output(Path(settings.out))
    choosing = choosing_of(
        resolve_draft(str(settings.draft)),
        open_traces(settings.traces, settings.listener),
        target=optional_path(settings.target),
        counts=optional_path(settings.counts),
    )
    found = _judged(settings, choosing) if settings.curve else _written(settings, choosing)
    sizes = found.curve.sizes if found.curve is not None else ()
    most = max((len(found.rows.target_ids) if found.rows is not None else 0, *sizes))
    return replace(found, warnings=(*choosing.warnings_of(most), *found.warnings))


def _written(settings: VocabSettings, choosing: "Choosing") -> "VocabReport":
    """Choose the rows, and write the folder."""
    from ...validate.vocabulary.vocab_report import VocabReport

    target, listener = optional_path(settings.target), settings.listener
    asked = RowsAsked(size=settings.size, coverage=settings.coverage, target=target)
    rows, out = asked.of(choosing), Path(settings.out or "")
    written = write_rows(choosing, rows, out, asked, listener=listener, on_stage=listener.stage)
    return VocabReport(choosing=choosing, rows=rows, cut=written, warnings=written.warnings)


def _judged(settings: VocabSettings, choosing: "Choosing") -> "VocabReport":
    """The curve, and what it is worth in time."""
    from ...calibration.traces.recorded_prompts import seen_prompts
    from ...calibration.vocabulary.choosing import check_same_target
    from ...validate.counting.trace_replay import chosen_num_draft_tokens
    from ...validate.judging.held_out import check_apart
    from ...validate.vocabulary.curve_chart import drawing
    from ...validate.vocabulary.size_curve import size_curve
    from ...validate.vocabulary.vocab_report import VocabReport

    traces, judge = choosing.traces, None
    sizes = _sizes(settings, choosing)
    machines, target, concurrencies = _serving(settings)
    if settings.judge is not None:
        judge = open_traces(settings.judge, settings.listener)
        check_same_target(traces, judge)
        check_apart(judge, seen_prompts(traces), "are among those that choose the rows")
        for cut in choosing.cuts:
            check_apart(judge, cut.choice.prompts, "chose the rows that the draft has")
    loaded = load_for_replay([choosing.source.folder], judge or traces, settings)
    with settings.listener.bar("replay", len(judge or traces), "work") as bar:
        curve = size_curve(
            loaded.drafts[0],
            choosing.chooser,
            traces,
            judge,
            sizes=sizes,
            num_draft_tokens=chosen_num_draft_tokens(settings.num_draft_tokens, loaded.drafts),
            batch_size=settings.batch_size,
            max_tokens=loaded.max_tokens,
            on_progress=bar.set,
        )
    if settings.plot is not None:
        name = choosing.source.folder.name
        write_reports({Path(settings.plot): drawing(curve, name)})
    estimate, why = _estimate(choosing, curve, machines, target, concurrencies)
    return VocabReport(
        choosing=choosing,
        curve=curve,
        estimate=estimate,
        warnings=() if why is None else (why,),
    )


def _sizes(settings: VocabSettings, choosing: "Choosing") -> tuple[int, ...]:
    """As asked, in ascending order; of the usual ones those that are cuts of this draft."""
    from ...validate.vocabulary.size_curve import usual_sizes

    rows = choosing.chooser.num_rows
    usual = [size for size in usual_sizes(rows) if size >= choosing.least] or [rows // 2]
    sizes = tuple(sorted(set(settings.sizes or usual)))
    for size in sizes:
        choosing.check_size("--sizes", size)
    return sizes


def _serving(
    settings: VocabSettings,
) -> "tuple[list[Machine], StepTimes | None, tuple[int, ...]]":
    """What the curve's speed is estimated for, checked before anything is replayed."""
    from ...quantize.estimate.work import Machine
    from ...quantize.gpus import named_gpu
    from ...validate.vocabulary.step_times import checked_concurrencies, parse_step_times

    concurrencies = checked_concurrencies(settings.concurrency)
    names = dict.fromkeys(named_gpu(name).name for name in settings.gpus or (USUAL_GPU,))
    machines = [Machine(gpu=named_gpu(name), efficiency=USUAL_EFFICIENCY) for name in names]
    if settings.target_step_ms is None:
        return machines, None, concurrencies
    return machines, parse_step_times(str(settings.target_step_ms), concurrencies), concurrencies


def _estimate(
    choosing: "Choosing",
    curve: "SizeCurve",
    machines: "Sequence[Machine]",
    target: "StepTimes | None",
    concurrencies: Sequence[int],
) -> "tuple[SizeEstimate | None, str | None]":
    """Bytes and times by size, or why they are not estimated."""
    from ...quantize.errors import EstimateError
    from ...validate.vocabulary.size_estimate import size_estimate

    if choosing.is_quantized:
        return None, (
            "bytes and times are estimated of unquantized drafts: give the one that this was made"
            " of"
        )
    try:
        return size_estimate(choosing.draft, curve, machines, target, concurrencies), None
    except EstimateError as exc:
        return None, f"bytes and times are not estimated: {exc.what}"
