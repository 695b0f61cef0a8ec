"""`traces`: what is done with trace folders beside recording them; a verb for each."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...calibration.dumps.dump_formats import DumpFormat
from ...calibration.traces.manifest import StorageChoice
from ...quantize.files.hub import resolve_draft
from ...recipes.bounds import AT_LEAST_1
from . import reports
from .arguments import AnyPath, OutFolder, TableIds, share
from .option import Argument, Option
from .references import Reference
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    from ...quantize.stored.loading import LoadedDraft


@dataclass(frozen=True, slots=True)
class TracesImportSettings(Settings):
    """Which dump of which target, and how it is read."""

    dump: Annotated[AnyPath, Argument("folder of the dump", "DUMP")]
    target: Annotated[
        AnyPath,
        Option(
            "folder of the dumped target; its head shows whether the answers are its "
            "own, and if it runs on this machine, a few recomputed positions show "
            "which layers were dumped",
            "TARGET",
        ),
    ]
    out: OutFolder
    _: KW_ONLY
    written_by: Annotated[
        DumpFormat,
        Option("tool that wrote the dump (vllm: its ExampleHiddenStatesConnector)", flag="--from"),
    ]
    draft: Annotated[
        Reference | None,
        Option(
            "draft that reads these hidden states; it names the expected layers, and "
            "settles their order if the target does not run on this machine",
            "DRAFT",
        ),
    ] = None
    aux_layer_ids: Annotated[
        Sequence[int] | None,
        Option(
            "layers that the dump should hold, counted from 0 (the layer's output)",
            "LAYER,...",
            flag="--aux-layers",
            several="commas",
        ),
    ] = None
    prompts: Annotated[
        AnyPath | None,
        Option(
            "prompt file of the dump, for ids and categories, and for where prompts "
            "end if the dump has no loss mask",
            "PROMPTS",
        ),
    ] = None
    greedy: Annotated[
        bool,
        Option(
            "you assert that the answers are the target's own at temperature 0, if "
            "the dump lacks the last hidden states to verify it"
        ),
    ] = False
    leave_out_off_policy: Annotated[
        bool,
        Option("leave out answers that the target would not have given, and report their number"),
    ] = False
    tables: Annotated[
        bool, Option("store the target's embedding and head too, as 'record --tables' does")
    ] = False
    table_ids: TableIds = ()

    def check(self) -> None:
        """Refuse rows of tables that are not carried."""
        from ...calibration.errors import TraceError

        if self.table_ids and not self.tables:
            raise TraceError("--table-ids", "says which rows the tables carry", fix="add --tables")


@verb(TracesImportSettings)
def traces_import(settings: TracesImportSettings) -> "reports.ImportReport":
    """Make traces of hidden states that a trainer or vLLM dumped.

    Returns:
        The traces, and what was found out about the dump.

    Raises:
        DraftQuantError: the dump is damaged, or belongs to another target; nothing is left behind.
    """
    from transformers.utils import logging

    from ...calibration.dumps.dump_conventions import Declared
    from ...calibration.dumps.import_dump import import_dump
    from ...calibration.passes.draft_inputs import mask_token_ids
    from ...calibration.prompts.prompt_file import read_prompts

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one bar is enough
    target = Path(settings.target)
    draft = _loaded(settings.draft, target) if settings.draft else None
    table_ids = (*settings.table_ids, *(mask_token_ids(draft.geometry) if draft else ()))
    prompts = read_prompts(Path(settings.prompts), target=target) if settings.prompts else None
    layers = settings.aux_layer_ids
    with settings.listener.bar("import", 1) as bar:
        return import_dump(
            settings.written_by,
            Path(settings.dump),
            target,
            Path(settings.out),
            declared=Declared(
                layer_ids=None if layers is None else tuple(layers),
                draft=draft,
                greedy=settings.greedy,
            ),
            prompts=prompts,
            leave_out_off_policy=settings.leave_out_off_policy,
            table_ids=table_ids if settings.tables else None,
            on_progress=bar.set,
        )


def _loaded(reference: Reference, target: Path) -> "LoadedDraft":
    from ...calibration.traces.target_tables import SharedTables, TargetTables
    from ...quantize.errors import CheckpointError
    from ...quantize.stored.loading import load_draft

    try:
        shared = TargetTables.find(target).shared()
    except CheckpointError:  # a config alone; a draft with tables of its own needs none
        shared = SharedTables({})
    return load_draft(resolve_draft(str(reference)).folder, shared=shared)


@dataclass(frozen=True, slots=True)
class TracesInfoSettings(Settings):
    """Which traces."""

    traces: Annotated[AnyPath, Argument("trace folder", "TRACES")]


@verb(TracesInfoSettings)
def traces_info(settings: TracesInfoSettings) -> "reports.TraceInfo":
    """Describe a trace folder, and check every trace in it.

    Returns:
        What the folder holds.

    Raises:
        DraftQuantError: a trace is damaged.
    """
    from ...calibration.traces.info import trace_info
    from ...calibration.traces.trace_folder import TraceFolder

    return trace_info(TraceFolder.open(Path(settings.traces)))


@dataclass(frozen=True, slots=True)
class TracesSplitSettings(Settings):
    """Which traces, into which two folders, and how many of them into the first."""

    traces: Annotated[AnyPath, Argument("trace folder to split; it is kept", "TRACES")]
    outs: Annotated[
        Sequence[AnyPath],
        Option(
            "the two folders to create, for example for calibration and for the gate",
            "A B",
            flag="--out",
            count=2,
        ),
    ]
    _: KW_ONLY
    fraction: Annotated[
        float | None, Option("share of the prompts that go to A", "SHARE", reads=share)
    ] = None
    count: Annotated[
        int | None, Option("number of prompts that go to A", "PROMPTS", bounds=AT_LEAST_1)
    ] = None
    categories: Annotated[
        tuple[str, ...],
        Option("categories that go to A as a whole", "CATEGORY", flag="--category"),
    ] = ()
    seed: Annotated[
        int, Option("seed of the split (default 0); equal seeds give equal splits", "SEED")
    ] = 0

    one_of = (("fraction", "count", "categories"),)

    def check(self) -> None:
        """Refuse a fraction that is no share."""
        from ...calibration.errors import TraceError

        if self.fraction is not None and not 0 < self.fraction < 1:
            raise TraceError("--fraction", f"expected a share in (0, 1), got {self.fraction}",
                             fix="give the share of the prompts in the first folder")  # fmt: skip


@verb(TracesSplitSettings)
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


@dataclass(frozen=True, slots=True)
class TracesMergeSettings(Settings):
    """Which traces, into which folder."""

    traces: Annotated[
        tuple[AnyPath, ...], Argument("trace folders to merge; they are kept", "TRACES")
    ]
    out: OutFolder


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


@dataclass(frozen=True, slots=True)
class TracesStoreSettings(Settings):
    """Which traces, how their hidden states are stored, and where."""

    traces: Annotated[AnyPath, Argument("trace folder to copy; it is kept", "TRACES")]
    out: OutFolder
    _: KW_ONLY
    feature_storage: Annotated[
        StorageChoice,
        Option("how hidden states are stored: as they are, rounded to FP8, or packed without loss"),
    ]


@verb(TracesStoreSettings)
def traces_store(settings: TracesStoreSettings) -> "reports.StoreReport":
    """Copy a trace folder, with its hidden states stored in fewer bytes, or exactly again.

    Returns:
        The folder that was written, opened, and the bytes of the shards before and after.

    Raises:
        DraftQuantError: they are stored so already, were rounded to FP8 before, or are damaged; or
            a package is not installed.
    """
    from ...calibration.traces.store_traces import store_traces
    from ...calibration.traces.trace_folder import TraceFolder

    traces = TraceFolder.open(Path(settings.traces))
    return store_traces(traces, Path(settings.out), settings.feature_storage)
