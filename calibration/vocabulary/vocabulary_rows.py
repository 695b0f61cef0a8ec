"""Choosing the rows that a draft's head keeps: by which text, for which draft, how many."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quantize.asked import Quantizing
from ...quantize.drafts import Draft
from ...quantize.drafts.geometry import MAP
from ...quantize.files.checkpoint import CONFIG_FILE, read_json_object
from ...quantize.files.hub import DraftSource, no_target, running_argv
from ...quantize.files.provenance import VocabularyChoice, VocabularyCut
from ...quantize.files.provenance_file import cuts_of, read_provenance
from ...quantize.files.publish import SPARE_BYTES
from ...quantize.files.staging import check_output, staged_source
from ...quantize.inspection import open_draft
from ...quantize.making.preparing import check_source
from ...quantize.planning.quantization_plan import make_plan
from ...quantize.stored.stored_draft import StoredDraft
from ...recipes import Recipe
from ...recipes.errors import CalibrationError
from ...recipes.listener import Listener
from ...recipes.regular_file import optional_path
from ..traces.held_out import seen_prompts
from ..traces.trace_folder import TraceFolder, file_sha256
from .cut_plan import TREE_WIDTH, check_may_be_cut, plan_cut, stored_target_ids
from .cut_vocabulary import VocabularyReport, cut_vocabulary
from .row_choice import (
    HeldOutCoverage,
    RowChooser,
    SaidText,
    TokenCounts,
    held_out_coverage,
    read_general_counts,
    said_texts,
)

_KEYS = ("eos_token_id", "bos_token_id")
_TEXT = "text_config"  # where the config of a multimodal target has that of its language model


def special_tokens(configs: Iterable[Mapping[str, Any]], vocab_size: int) -> tuple[int, ...]:
    """The ids that configs name, each once, if the vocabulary has them."""
    tokens: list[int] = []
    for config in configs:
        section = config.get(_TEXT)
        for each in (config, section if isinstance(section, Mapping) else {}):
            for named in map(each.get, _KEYS):
                ids = named if isinstance(named, list) else [named]
                tokens += [token for token in ids if type(token) is int and 0 <= token < vocab_size]
    return tuple(dict.fromkeys(tokens))


_GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRows:
    """Rows that were chosen, ascending, and what they cover.

    `held_out`: share of the same text, each part under rows that the other parts chose.
    """

    target_ids: tuple[int, ...]
    coverage: float  # share of the tokens that chose them
    held_out: float
    held_out_by_category: Mapping[str, float]
    never_said: float  # share of tokens that the choosing parts never said
    needed: int | None  # rows that the coverage needs, where one was asked for

    @property
    def more_than_asked(self) -> str | None:
        """A note where engines need more rows than the coverage does."""
        size = len(self.target_ids)
        if self.needed is None or self.needed >= size:
            return None
        return (
            f"{self.needed:,} rows cover what was asked for; {size:,} are kept, because engines"
            " may take so many of one step"
        )

    @property
    def worst(self) -> tuple[str, float]:
        """The category with the least coverage."""
        return min(self.held_out_by_category.items(), key=lambda item: item[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choosing:
    """The text that chooses rows, and the draft, as its headers describe it."""

    source: DraftSource
    draft: Draft
    is_quantized: bool
    traces: TraceFolder
    texts: Sequence[SaidText]
    chooser: RowChooser
    cuts: tuple[VocabularyCut, ...]
    warnings: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.token_ids) for text in self.texts)

    @property
    def num_distinct(self) -> int:
        """Different tokens among them for which the draft has a row."""
        is_said = TokenCounts.of(self.texts, self.chooser.vocab_size).pooled > 0
        offered = self.chooser.offered
        return int(is_said[slice(None) if offered is None else list(offered)].sum())

    @property
    def said(self) -> str:
        """The amount of text, in words."""
        return (
            f"{len(self.texts):,} prompts ({self.num_tokens:,} tokens, {self.num_distinct:,}"
            " different ones with a row)"
        )

    def warnings_of(self, size: int) -> tuple[str, ...]:
        """Warnings on the choice, and on more rows than there are different tokens."""
        if size <= (used := self.num_distinct):
            return self.warnings
        few = (
            f"{size - used:,} of {size:,} rows are of tokens that were never said by what chooses"
            f" them, {self.said}: record more prompts, or keep fewer rows"
        )
        return (*self.warnings, few)

    @property
    def least(self) -> int:
        """Rows that engines need in order to draft at all."""
        return max(TREE_WIDTH, self.draft.geometry.most_draft_tokens or 0)

    def check_size(self, option: str, size: int) -> None:
        """Refuse a number of rows that is not a cut of this draft."""
        rows, folder = self.chooser.num_rows, self.source.folder
        if not self.least <= size < rows:
            raise CalibrationError(
                option,
                f"expected from {self.least:,} (what engines take of one step at most) to fewer"
                f" than the {rows:,} rows that {folder} has, got {size:,}",
                fix="ask for another size; draftquant vocab --curve shows what sizes cost",
            )

    def record(
        self, rows: ChosenRows, size: int | None, coverage: float | None
    ) -> VocabularyChoice:
        """Why these rows were chosen, for draftquant.json."""
        seen = seen_prompts(self.traces)
        return VocabularyChoice(
            method=self.chooser.method,
            traces_sha256=self.traces.sha256,
            size=size,
            coverage=coverage,
            coverage_reached=rows.coverage,
            calibration_prompts=seen.sha256,
            calibration_sketches=seen.sketches,
            calibration_target=seen.target,
        )


def chosen_rows(
    choosing: Choosing, size: int | None, coverage: float | None, *, option: str = "--size"
) -> ChosenRows:
    """The rows of a size, or of the least size that covers this share of held-out text."""
    held_out = held_out_coverage(choosing.chooser, choosing.texts)
    needed: int | None = None
    if size is None:
        needed = _least_size(choosing, held_out, coverage or 1.0)
        size = max(choosing.least, needed)
    else:
        choosing.check_size(option, size)
    order = choosing.chooser.order(choosing.texts)
    counts = TokenCounts.of(choosing.texts, choosing.chooser.vocab_size).pooled
    return ChosenRows(
        target_ids=order.first(size),
        coverage=float(order.covered(counts)[size] / counts.sum()),
        held_out=held_out.of(size),
        held_out_by_category=held_out.by_category(size),
        never_said=held_out.never_said / int(held_out.totals.sum()),
        needed=needed,
    )


def _least_size(choosing: Choosing, held_out: HeldOutCoverage, coverage: float) -> int:
    rows = choosing.chooser.num_rows
    size = held_out.least_size(coverage)
    if size is None:
        raise CalibrationError(
            "--coverage",
            f"{coverage:.2%} of held-out text cannot be reached: all {rows:,} rows of the draft"
            f" (of {choosing.chooser.vocab_size:,} tokens) cover {held_out.of(rows):.2%}, and a"
            " cut makes no row that the draft lacks",
            fix="ask for less, or cut the draft that has the whole vocabulary",
        )
    if size >= rows:
        raise CalibrationError(
            "--coverage",
            f"{coverage:.2%} of held-out text needs all {rows:,} rows: {held_out.never_said:,} of"
            f" its {int(held_out.totals.sum()):,} tokens were said by no other part of the traces",
            fix="ask for less, or record traces of more prompts",
        )
    return size


def choosing_of(
    source: DraftSource, traces: TraceFolder, *, target: Path | None, counts: Path | None
) -> Choosing:
    """Read the text that chooses rows; the target's configs name tokens that are always kept."""
    stored = StoredDraft.read(source.checkpoint())
    draft = stored.draft
    check_may_be_cut(draft)
    ids = stored_target_ids(draft)
    offered = None if draft.row(MAP) is None else tuple(ids.tolist())
    vocab_size, recorded = draft.geometry.vocab_size, traces.manifest.target
    if recorded.vocab_size != vocab_size:
        raise CalibrationError(
            traces.folder,
            f"was recorded with a target of {recorded.vocab_size:,} tokens, {recorded.name}; the"
            f" draft is for one of {vocab_size:,}",
            fix="give traces of the draft's own target: ids of another tokenizer are other tokens",
        )
    configs: list[Mapping[str, Any]] = [draft.checkpoint.config]
    if target is not None:
        _check_target(target, traces)
        paths = [target / name for name in (CONFIG_FILE, _GENERATION_FILE)]
        configs += [read_json_object(path, no_target(target)) for path in paths if path.exists()]
    texts = said_texts(traces)
    chooser = RowChooser(
        vocab_size=vocab_size,
        offered=offered,
        always=special_tokens(configs, vocab_size),
        general=None if counts is None else read_general_counts(counts, vocab_size),
    )
    if not any(len(text.token_ids) for text in texts):
        raise CalibrationError(
            traces.folder,
            "says nothing that a draft is to propose: no continuation has more than one token",
            fix="record longer continuations (record --max-new-tokens)",
        )
    cuts = cuts_of(read_provenance(source.folder))
    return Choosing(
        source=source,
        draft=draft,
        is_quantized=bool(stored.modules),
        traces=traces,
        texts=texts,
        chooser=chooser,
        cuts=cuts,
        warnings=(*_lacking(chooser, texts), *_chosen_before(cuts, traces)),
    )


def check_same_target(traces: TraceFolder, judge: TraceFolder) -> None:
    """Refuse traces of different targets."""
    one, other = traces.manifest.target, judge.manifest.target
    known = None not in (one.config_sha256, other.config_sha256)
    if one.vocab_size != other.vocab_size or (known and one.config_sha256 != other.config_sha256):
        what = f"was recorded with another target ({other.name}) than {traces.folder} ({one.name})"
        fix = "record both with the target that the draft serves"
        raise CalibrationError(judge.folder, what, fix=fix)


def _check_target(target: Path, traces: TraceFolder) -> None:
    recorded = traces.manifest.target
    read_json_object(target / CONFIG_FILE, no_target(target))
    if recorded.config_sha256 not in (None, file_sha256(target / CONFIG_FILE)):
        what = f"has another {CONFIG_FILE} than the target of the traces, {recorded.name}"
        fix = "give the target that was recorded: ids of another tokenizer are other tokens"
        raise CalibrationError(f"--target {target}", what, fix=fix)


def _chosen_before(cuts: Sequence[VocabularyCut], traces: TraceFolder) -> Iterable[str]:
    """Text that chose the draft's present rows covers itself better than other text does."""
    chose = {prompt for cut in cuts for prompt in cut.choice.calibration_prompts}
    again = chose.intersection(seen_prompts(traces).sha256) if chose else ()
    if again:
        yield (
            f"prompts of these traces chose the rows that the draft has ({len(again):,} of them),"
            " so nothing here is held out from that: give traces of other prompts, or the draft"
            " with the whole vocabulary"
        )


def _lacking(chooser: RowChooser, texts: Sequence[SaidText]) -> Iterable[str]:
    if chooser.offered is None:
        return
    used = TokenCounts.of(texts, chooser.vocab_size).pooled
    said_in_all, used[list(chooser.offered)] = int(used.sum()), 0
    if used.any():
        yield (
            f"{int((used > 0).sum()):,} tokens that the target says ({used.sum() / said_in_all:.2%}"
            f" of its text) have no row in the draft, which has {chooser.num_rows:,}: a cut makes"
            " no row that the draft lacks"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAsked:
    """Which rows: a number, or as many as cover that share of held-out text."""

    size: int | None
    coverage: float | None
    target: Path | None  # source of the rows if the draft has no head
    option: str = "--size"

    def of(self, choosing: Choosing) -> ChosenRows:
        """The rows of a folder."""
        return chosen_rows(choosing, self.size, self.coverage, option=self.option)


def write_rows(
    choosing: Choosing,
    rows: ChosenRows,
    out: Path,
    asked: RowsAsked,
    *,
    listener: Listener,
    on_stage: Callable[[str], None],
) -> VocabularyReport:
    """Write the draft with only these rows."""
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
    source: DraftSource, recipe: Recipe, asked: Quantizing
) -> Iterator[tuple[DraftSource, Draft]]:
    """Give the draft with the requested rows; it is hidden beside the output.

    Nothing is written before it is known that the recipe fits it and the disk holds both folders.
    Leaving the block removes it.
    """
    out, target, listener = Path(asked.out), optional_path(asked.target), asked.listener
    wanted = RowsAsked(size=asked.vocab_size, coverage=None, target=target, option="--vocab-size")
    check_output(out, source.folder)
    traces = TraceFolder.open(Path(asked.traces or ""))
    choosing = choosing_of(source, traces, target=target, counts=None)
    rows = wanted.of(choosing)
    cut = plan_cut(StoredDraft.read(source.checkpoint()), rows.target_ids, target)
    plan = make_plan(recipe, cut.result(), target_layers=asked.target_layers)
    check_source(plan)
    needed = cut.bytes_after + plan.bytes_after + 2 * SPARE_BYTES
    check_output(out, source.folder, needed_bytes=needed)
    with staged_source(out) as folder:
        place = folder / source.folder.resolve().name  # the draft's name, which messages use
        written = write_rows(
            choosing, rows, place, wanted, listener=listener, on_stage=lambda _stage: None
        )
        for warning in choosing.warnings_of(written.size):
            listener.warning(warning)
        listener.note(_said(choosing, rows, written))
        yield open_draft(place)


def _said(choosing: Choosing, rows: ChosenRows, written: VocabularyReport) -> str:
    """What is quantized, in a line."""
    head = "" if written.head_from is None else f", of the target's {written.head_from}"
    return (
        f"vocabulary {written.size:,} of {written.vocabulary:,} ({written.size_before:,} rows"
        f" before{head}), chosen by {choosing.said}: they cover"
        f" {rows.held_out:.2%} of that text held out; this draft is quantized"
    )
