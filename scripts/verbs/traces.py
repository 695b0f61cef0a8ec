"""`traces`: what to do with trace folders besides recording them, one verb for each."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...calibration.dumps import DumpImport
from ...calibration.traces.manifest import StorageChoice
from ...recipes.brief import counted
from ...recipes.decode import encode
from ...recipes.listener import Heard
from ...recipes.regular_file import AnyPath
from ..frame import reports
from ..frame.console import megabytes, print_table, stdout, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...calibration.traces.manifest import TraceManifest
    from ...calibration.traces.trace_folder import TraceFolder
    from ...calibration.traces.trace_info import TraceInfo


@verb(DumpImport)
def traces_import(settings: DumpImport) -> "reports.ImportReport":
    """Make traces of hidden states that a trainer or vLLM dumped.

    Returns:
        The traces, and what was found out about the dump.

    Raises:
        DraftQuantError: the dump is damaged, or belongs to another target; nothing is left behind.
    """
    from ...calibration.dumps.import_dump import import_asked

    return import_asked(settings)


@dataclass(frozen=True)
class TracesInfoSettings(Heard):
    """Which traces."""

    traces: AnyPath


@verb(TracesInfoSettings)
def traces_info(settings: TracesInfoSettings) -> "reports.TraceInfo":
    """Describe a trace folder, and check every trace in it.

    Returns:
        What the folder holds.

    Raises:
        DraftQuantError: a trace is damaged.
    """
    from ...calibration.traces.trace_folder import TraceFolder
    from ...calibration.traces.trace_info import trace_info

    return trace_info(TraceFolder.open(Path(settings.traces)))


@dataclass(frozen=True)
class TracesSplitSettings(Heard):
    """Which traces, into which two folders, and how many of them into the first."""

    traces: AnyPath
    outs: Sequence[AnyPath]
    _: KW_ONLY
    fraction: float | None = None
    count: int | None = None
    categories: tuple[str, ...] = ()
    seed: int = 0

    @override
    def check(self) -> None:
        from ...recipes.errors import TraceError

        if self.fraction is not None and not 0 < self.fraction < 1:
            raise TraceError("--fraction", f"expected a share in (0, 1), got {self.fraction}",
                             fix="give the share of the prompts in the first folder")  # fmt: skip


@verb(TracesSplitSettings, one_of=("fraction", "count", "categories"))
def traces_split(settings: TracesSplitSettings) -> "reports.SplitReport":
    """Split a trace folder into two that share no prompt, for calibration and for the gate.

    Returns:
        The two folders, opened, and how many prompts of each category are in them.

    Raises:
        DraftQuantError: the first folder cannot have so many prompts, or one of the two exists.
    """
    from ...calibration.traces.sets import split_traces
    from ...calibration.traces.trace_folder import TraceFolder

    traces, count = TraceFolder.open(Path(settings.traces)), settings.count
    if settings.fraction is not None:
        count = round(settings.fraction * len(traces))
    first, second = settings.outs
    return split_traces(
        traces,
        Path(first),
        Path(second),
        count=count,
        categories=settings.categories,
        seed=settings.seed,
    )


@dataclass(frozen=True)
class TracesMergeSettings(Heard):
    """Which traces, into which folder."""

    traces: tuple[AnyPath, ...]
    out: AnyPath


@verb(TracesMergeSettings)
def traces_merge(settings: TracesMergeSettings) -> "reports.MergeReport":
    """Join several trace folders of one target.

    Returns:
        The folder that was written, opened, and which prompts were renamed.

    Raises:
        DraftQuantError: the folders were recorded differently, or one of them is given twice.
    """
    from ...calibration.traces.sets import merge_traces
    from ...calibration.traces.trace_folder import TraceFolder

    folders = [TraceFolder.open(Path(folder)) for folder in settings.traces]
    return merge_traces(folders, Path(settings.out))


@dataclass(frozen=True)
class TracesStoreSettings(Heard):
    """Which traces, how their hidden states are stored, and where."""

    traces: AnyPath
    out: AnyPath
    _: KW_ONLY
    feature_storage: StorageChoice


@verb(TracesStoreSettings)
def traces_store(settings: TracesStoreSettings) -> "reports.StoreReport":
    """Copy a trace folder, with its hidden states stored in fewer bytes, or exactly again.

    Returns:
        The folder that was written, opened, and the bytes of the shards before and after.

    Raises:
        DraftQuantError: they are stored so already, were rounded to FP8 before, or are damaged; or
            a package is not installed.
    """
    from ...calibration.traces.sets import store_traces
    from ...calibration.traces.trace_folder import TraceFolder

    traces = TraceFolder.open(Path(settings.traces))
    return store_traces(traces, Path(settings.out), settings.feature_storage)


_STORED = {None: "", "fp8-per-token": ", rounded to FP8 per token", "zstd": ", packed by zstd"}


def _lines(info: "TraceInfo") -> Iterator[str]:
    manifest = info.traces.manifest
    target, features = manifest.target, manifest.features
    yield f"sha256 {info.traces.sha256}"
    yield (
        f"target {target.name}, {target.num_layers} layers, vocabulary {target.vocab_size:,},"
        f" weights {(target.weights_sha256 or 'not known')[:16]},"
        f" recorded by {manifest.recorded_by or 'transformers'}"
    )
    yield (
        f"features {features.kind} of layers {list(features.aux_layer_ids)} (counted after the"
        f" layer), {features.width:,} wide, {features.dtype}"
        f"{_STORED[features.storage]}"
    )
    yield _decoding(manifest)
    if manifest.too_long:
        left, cut = len(manifest.too_long.skipped), len(manifest.too_long.truncated)
        yield (
            f"too long for the target: {counted(left, 'prompt')} left out, {cut} cut to their last"
            " tokens"
        )
    for dataset in manifest.datasets or ():
        yield f"prompts of the data set {dataset}"
    yield (
        f"{counted(info.num_independent, 'group')} of related prompts, the largest of"
        f" {info.largest_group}; {info.num_copies} {'copy' if info.num_copies == 1 else 'copies'},"
        f" {counted(info.num_later_turns, 'later turn')},"
        f" {counted(info.num_near_duplicates, 'near duplicate')},"
        f" {counted(info.num_clusters, 'declared cluster')}"
    )
    if info.suggested_clusters:
        yield info.suggested_clusters
    yield _tables(manifest)
    yield f"the target's argmax is known at {info.known_top1:.0%} of the prompts' positions"
    if info.head_agreement is not None:
        yield f"the stored head predicts {info.head_agreement:.1%} of the tokens"
    if info.features.checked:
        share = info.features.share[0]
        yield info.features.fault() or (
            f"hidden states fit their tokens, which explain {share:.0%} of their variance"
        )
    else:
        yield "too few tokens repeat to verify that the hidden states fit them"


def _decoding(manifest: "TraceManifest") -> str:
    sampling, logprobs = manifest.sampling, manifest.logprobs
    beside = f", {logprobs.kind} log-probabilities" if logprobs else ""
    beside += ", end of text ignored" if manifest.ignore_eos else ""
    if sampling is None:
        return f"greedy{beside}"
    seed = "not known" if sampling.seed is None else sampling.seed
    return (
        f"sampled at temperature {manifest.temperature:g}, top-p {sampling.top_p:g}, top-k"
        f" {sampling.top_k}, seed {seed}{beside}"
    )


def _tables(manifest: "TraceManifest") -> str:
    tables = manifest.tables
    if tables is None:
        return "no embedding and head stored: drafts without their own need the target"
    norm = "with" if tables.norm_dtype else "without"
    return (
        f"tables: {tables.num_token_ids:,} embeddings, the head {norm} its norm,"
        f" {megabytes(tables.nbytes)}"
    )


def _plain(part: Any) -> Any:
    return dataclasses.asdict(part) if hasattr(part, "__dataclass_fields__") else part


def _mapping(info: "TraceInfo", _settings: object) -> dict[str, Any]:
    manifest = info.traces.manifest
    kept = ("nbytes", "num_copies", "num_later_turns", "num_near_duplicates", "num_independent",
            "largest_group",
            "num_clusters", "suggested_clusters", "known_top1", "head_agreement")  # fmt: skip
    of_manifest = ("target", "recorded_by", "features", "temperature", "sampling", "ignore_eos",
                   "logprobs", "too_long")  # fmt: skip
    return {
        "sha256": info.traces.sha256,
        "num_prompts": len(info.traces),
        "num_tokens": manifest.num_tokens,
        **{name: _plain(getattr(manifest, name)) for name in of_manifest},
        "datasets": [_plain(dataset) for dataset in manifest.datasets or ()],
        "tables": _plain(manifest.tables),
        "categories": [_plain(category) for category in info.categories],
        **{name: getattr(info, name) for name in kept},
        "feature_evidence": encode(info.features),
        "feature_problem": info.features.fault(),
    }


def print_written(traces: "TraceFolder", of: str = "") -> None:
    """Print its name, its numbers of traces and tokens, and its identity."""
    stdout().line(
        (str(traces.folder), "bold"),
        f": {counted(len(traces), 'trace')}{of}, {traces.manifest.num_tokens:,} tokens, sha256"
        f" {traces.sha256[:16]}",
    )


def written(traces: "TraceFolder") -> dict[str, Any]:
    """The same for JSON."""
    return {
        "out": traces.folder,
        "traces": len(traces),
        "tokens": traces.manifest.num_tokens,
        "sha256": traces.sha256,
    }


def _imported(report: "reports.ImportReport", _settings: object) -> dict[str, Any]:
    return written(report.traces) | {
        "texts": report.num_samples,
        "findings": list(report.layout.sentences()),
        "left_out_off_policy": report.num_off_policy,
        "without_answer": report.num_without_answer,
    }


def _show_imported(report: "reports.ImportReport", _settings: object) -> None:
    print_written(report.traces, f" of {counted(report.num_samples, 'text')}")
    for sentence in report.layout.sentences():
        stdout().line(f"  {sentence}")
    if report.num_off_policy:
        left = counted(report.num_off_policy, "answer")
        stdout().line(f"  {left} left out: the target would have given another one")
    if report.num_without_answer:
        stdout().line(f"  {counted(report.num_without_answer, 'text')} without an answer")


def _show_info(info: "TraceInfo", settings: TracesInfoSettings) -> None:
    rows = table(
        f"{settings.traces}, {counted(len(info.traces), 'prompt')},"
        f" {info.traces.manifest.num_tokens:,} tokens, {megabytes(info.nbytes)}",
        "category",
        "prompts",
        "prompt tokens",
        "new tokens",
        "shortest",
        "longest",
    )
    for part in info.categories:
        sizes = (part.num_prompts, part.prompt_tokens, part.new_tokens, part.shortest, part.longest)
        rows.row(part.category, *(f"{size:,}" for size in sizes))
    print_table(rows)
    for line in _lines(info):
        stdout().line(line)


def _parted(report: "reports.SplitReport", _settings: object) -> dict[str, Any]:
    return {
        "first": written(report.first),
        "second": written(report.second),
        "by_category": {name: list(counts) for name, counts in report.by_category.items()},
        "groups": report.num_groups,
        "largest_group": report.largest_group,
    }


def _show_parted(report: "reports.SplitReport", settings: TracesSplitSettings) -> None:
    names = [str(out) for out in settings.outs]
    title = f"{settings.traces}, {counted(len(report.first) + len(report.second), 'prompt')}"
    rows = table(title, "category", *names)
    for category, (first, second) in report.by_category.items():
        rows.row(category, str(first), str(second))
    rows.row("sum", str(len(report.first)), str(len(report.second)))
    print_table(rows)
    stdout().line(
        f"{report.num_groups} groups of related prompts, each on one side; the largest has"
        f" {report.largest_group}"
    )
    if report.lopsided:
        stdout().line(
            "more than half of the prompts are related, and the gate counts them as one: record"
            " prompts that differ more, and that the target answers with other texts"
        )


def _merged(report: "reports.MergeReport", _settings: object) -> dict[str, Any]:
    absent = [str(folder) for folder in report.without_tables]
    return written(report.traces) | {"renamed": dict(report.renamed), "without_tables": absent}


def _show_merged(report: "reports.MergeReport", _settings: object) -> None:
    print_written(report.traces)
    if report.renamed:
        old, new = next(iter(report.renamed.items()))
        stdout().line(
            f"{len(report.renamed)} prompts were renamed because their ids existed twice: {old} is"
            f" now {new}"
        )
    if report.without_tables:
        named = ", ".join(map(str, report.without_tables))
        stdout().line(f"the merged folder has no embedding and head, because {named} has none")


def _stored(report: "reports.StoreReport", settings: TracesStoreSettings) -> dict[str, Any]:
    return written(report.traces) | {
        "feature_storage": settings.feature_storage,
        "nbytes_before": report.nbytes_before,
        "nbytes": report.nbytes,
    }


def _show_stored(report: "reports.StoreReport", _settings: object) -> None:
    before, after = report.nbytes_before, report.nbytes
    print_written(report.traces)
    stdout().line(f"shards: {megabytes(before)} -> {megabytes(after)}, {after / before:.1%}")


COMMANDS = {
    "import": Command(traces_import, _show_imported, _imported),
    "info": Command(traces_info, _show_info, _mapping),
    "split": Command(traces_split, _show_parted, _parted),
    "merge": Command(traces_merge, _show_merged, _merged),
    "store": Command(traces_store, _show_stored, _stored),
}
