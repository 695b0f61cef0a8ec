"""`record`: what a target does on prompts, for calibration and replay."""

import argparse
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.checkpoint import CONFIG_FILE, Checkpoint
from ...quantize.files.hub import folder_of
from ...recipes.listener import SILENT, Unit, beyond_kept
from ..frame import reports
from ..frame.console import megabytes, print_document, print_json, stdout
from ..frame.verb import verb
from ..record_settings import RecordSettings
from .traces import print_written, written

if TYPE_CHECKING:
    import torch

    from ...calibration.prompts.prompt_file import Prompt
    from ...calibration.prompts.prompt_source import ReadPrompts
    from ...calibration.recording.conversations import Record
    from ...calibration.recording.decoding import Decoding
    from ...calibration.recording.record_traces import FixedBatch, RecordedBatch
    from ...calibration.recording.target_shape import FittedPrompts, TargetShape
    from ...calibration.traces.trace_folder import TraceFolder
    from ...calibration.vllm.recording_plan import RecordingPlan
    from ...quantize.stored.loading import LoadedDraft
    from ..on_ray import Placed

# ---- The prompts that `record` gives its target: of a file, of a data set, or texts that go on


def prompts_to_record(settings: RecordSettings) -> "FittedPrompts":
    """The prompts that are recorded, and a word on those that are too long."""
    from ...calibration.recording.target_shape import fitted_prompts

    found, shape = _read(settings), shape_of(settings)
    read = found.prompts
    fitted = fitted_prompts(
        read, shape, settings.max_new_tokens, settings.too_long, settings.prompts
    )
    if long := fitted.too_long:
        done = "left out" if long.skipped else "cut to their last tokens"
        names = long.skipped or long.truncated
        verb = "is" if len(names) == 1 else "are"
        settings.listener.warning(
            f"{settings.prompts}: {len(names)} of {len(read)} prompts {verb} {done}: with"
            f" {settings.max_new_tokens} new tokens they exceed the target's {shape.max_positions}"
            f" positions ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
        )
        if long.truncated and settings.continued and any(one.conversation_sha256 for one in read):
            settings.listener.warning(
                f"{settings.prompts}: a text that is cut no longer begins as its conversation did:"
                " gate judges it only in one folder with the traces that began it (traces merge)"
            )
    return dataclasses.replace(fitted, dataset=found.dataset)


def _read(settings: RecordSettings) -> "ReadPrompts":
    from ...calibration.prompts.prompt_file import PromptEncoder
    from ...calibration.prompts.prompt_source import ReadPrompts
    from ...calibration.traces.manifest import MANIFEST_FILE

    encoder = PromptEncoder(Path(settings.target), continues=settings.continued)
    if settings.continued and (Path(settings.prompts) / MANIFEST_FILE).is_file():
        return ReadPrompts(prompts=_recorded_texts(settings))
    read = settings.read_prompts(settings.prompts, encoder)
    longer = sum(bool(prompt.later_turns) for prompt in read.prompts)
    if longer and settings.turns == "first":
        settings.listener.note(
            f"{settings.prompts}: {longer} of {len(read.prompts)} prompts have later turns of the"
            " user, which follow the target's answer: the first turn is recorded (--turns all:"
            " each)"
        )
    return read


def _recorded_texts(settings: RecordSettings) -> "tuple[Prompt, ...]":
    """Texts of a trace folder, and a word on those that have ended or are another target's."""
    from ...calibration.recording.conversations import recorded_texts
    from ...calibration.recording.target_shape import end_token_ids
    from ...calibration.traces.trace_folder import TraceFolder, file_sha256

    target, traces = Path(settings.target), TraceFolder.open(Path(settings.prompts))
    ends = frozenset[int]() if settings.ignore_eos else end_token_ids(target)
    found = recorded_texts(traces, shape_of(settings).vocab_size, ends, settings.choice)
    if found.ended:
        named = ", ".join(found.ended[:3]) + (", ..." if found.ended[3:] else "")
        settings.listener.warning(
            f"{settings.prompts}: {len(found.ended)} of {len(traces)} texts end with the target's"
            f" end of text, and are left out ({named})"
        )
    recorded = traces.manifest.target
    if recorded.config_sha256 not in (None, file_sha256(target / CONFIG_FILE)):
        settings.listener.warning(
            f"{settings.prompts}: the texts are of the target {recorded.name}, whose {CONFIG_FILE}"
            f" is another than that of {target.name}: they are given, and not its own"
        )
    return found.prompts


def shape_of(settings: RecordSettings) -> "TargetShape":
    """Sizes of the target before its weights are read; an engine may know more kinds of them."""
    from ...calibration.recording.target_model import configured_shape
    from ...calibration.recording.target_shape import TargetShape

    read = TargetShape.read if settings.engine == "vllm" else configured_shape
    return read(Path(settings.target))


@verb(RecordSettings)
def record(settings: RecordSettings) -> "reports.TraceFolder | str":
    """Let a target continue prompts, and record the hidden states that a draft reads.

    Example:
        >>> traces = dq.record(
        ...     "TARGET", "prompts.jsonl", "NEW", draft="DRAFT", max_new_tokens=8
        ... )
        >>> len(traces), traces.manifest.num_tokens > 0
        (2, True)

    Returns:
        The folder that was written, opened; its length is the number of traces. With
        `print_server_args=True` it is the command that starts a vLLM server to record from.

    Raises:
        DraftQuantError: the target, the draft, the prompts or a setting cannot be used, or the
            folder exists already.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one bar is enough
    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # missing weights are our error
    how = _how(settings)
    fitted = prompts_to_record(settings)
    if settings.print_server_args:
        assert settings.shared is not None  # see `RecordSettings.check`
        plan = _vllm_plan(settings, how, fitted)
        return plan.setup(Path(settings.shared), dict(settings.engine_args or {})).command()
    assert settings.out is not None  # likewise
    unit: Unit = "items" if settings.engine == "vllm" else "work"
    turns = itertools.count(1)
    with ExitStack() as stack:
        by: Callable[..., TraceFolder] = _by_vllm if settings.engine == "vllm" else _by_transformers
        if settings.ray is not None:
            by = partial(_by_transformers, elsewhere=stack.enter_context(_ray_tasks(settings, how)))
        bar = stack.enter_context(settings.listener.bar("record", len(fitted.prompts), unit))

        def records(some: "Sequence[Prompt]", folder: Path) -> "TraceFolder":
            these = dataclasses.replace(fitted, prompts=tuple(some))
            if settings.turns == "all":
                bar.phase(f"record turn {next(turns)}", len(some), unit)
            show = beyond_kept(bar) if settings.engine == "vllm" else bar.set
            return by(settings, how, these, folder, show)

        if settings.turns == "all":
            return _all_turns(settings, fitted.prompts, records)
        return records(fitted.prompts, Path(settings.out))


@dataclass(frozen=True, slots=True, kw_only=True)
class _HowToRecord:
    """What is recorded of every prompt, whoever runs the target; fields as in `record_traces`."""

    decoding: "Decoding"
    aux_layer_ids: tuple[int, ...] | None
    fuse_with: "LoadedDraft | None"
    table_ids: tuple[int, ...] | None
    device: "torch.device"


def _how(settings: RecordSettings) -> _HowToRecord:
    import torch

    from ...calibration.passes.draft_inputs import mask_token_ids
    from ...calibration.passes.memory import resolve_device
    from ...calibration.recording.decoding import Decoding
    from ...calibration.recording.target_shape import check_draft_fits
    from ...calibration.traces.target_tables import TargetTables
    from ...quantize.drafts import read_config
    from ...quantize.stored.loading import load_draft

    device = resolve_device(settings.device)
    given, fuse_with = settings.aux_layer_ids, None
    aux_layer_ids = None if given is None else tuple(given)
    table_ids = tuple(settings.table_ids)
    if settings.draft:
        folder = folder_of(settings.draft)
        _, geometry = read_config(Checkpoint.open(folder))
        check_draft_fits(folder.name, geometry, shape_of(settings), aux_layer_ids)
        aux_layer_ids = aux_layer_ids or geometry.aux_layer_ids
        table_ids += mask_token_ids(geometry)
        if settings.fused:
            dtype = getattr(torch, settings.computes_in)
            shared = TargetTables.find(Path(settings.target)).shared(None, device)
            fuse_with = load_draft(folder, dtype=dtype, device=device, compact=True, shared=shared)
    return _HowToRecord(
        decoding=Decoding(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed,
            logprobs=settings.logprobs,
            num_top_logprobs=settings.top_logprobs,
            ignore_eos=settings.ignore_eos,
        ),
        aux_layer_ids=aux_layer_ids,
        fuse_with=fuse_with,
        table_ids=table_ids if settings.tables else None,
        device=device,
    )


def _by_transformers(
    settings: RecordSettings,
    how: _HowToRecord,
    fitted: "FittedPrompts",
    out: Path,
    on_progress: Callable[[int, int], None],
    elsewhere: "Callable[[Sequence[FixedBatch]], Iterator[RecordedBatch]] | None" = None,
) -> "TraceFolder":
    from ...calibration.recording.record_traces import record_traces
    from ...calibration.recording.target_model import Placement
    from ...calibration.traces.stored_features import storage_of

    return record_traces(
        Path(settings.target),
        fitted.prompts,
        out,
        max_new_tokens=settings.max_new_tokens,
        decoding=how.decoding,
        aux_layer_ids=how.aux_layer_ids,
        fuse_with=how.fuse_with,
        dtype=settings.computes_in,
        stored=settings.stored_in,
        batch_size=settings.batch_size,
        fixed_batches=settings.fixed_batches,
        placement=Placement(device=how.device, device_map=settings.device_map),
        table_ids=how.table_ids,
        storage=storage_of(settings.feature_storage),
        too_long=fitted.too_long,
        dataset=fitted.dataset,
        elsewhere=elsewhere,
        on_progress=on_progress,
        on_note=settings.listener.note,
    )


def _ray_tasks(
    settings: RecordSettings, how: _HowToRecord
) -> "AbstractContextManager[Placed[FixedBatch, RecordedBatch]]":
    """Inside the block, fixed batches are recorded by the cluster of the settings."""
    from ..on_ray import ray_tasks

    assert settings.ray is not None  # its caller asks
    sent = dataclasses.replace(
        settings,
        listener=SILENT,
        device=how.device.type,
        target=Path(settings.target).absolute(),
        draft=settings.draft and folder_of(settings.draft).absolute(),
    )
    return ray_tasks(settings.ray, how.device, partial(_open_recording, sent))


@contextmanager
def _open_recording(settings: RecordSettings) -> "Iterator[Callable[[FixedBatch], RecordedBatch]]":
    """In a worker: load the target; what the block is given records a batch."""
    from ...calibration.recording.record_traces import record_batch
    from ...calibration.recording.target_model import Placement, opened_target
    from ...calibration.traces.stored_features import storage_of

    how, scratch = _how(settings), Path(tempfile.gettempdir())
    with opened_target(
        Path(settings.target),
        aux_layer_ids=how.aux_layer_ids,
        fuse_with=how.fuse_with,
        dtype=settings.computes_in,
        stored=settings.stored_in,
        placement=Placement(device=how.device),
        storage=storage_of(settings.feature_storage),
        beside=scratch,
    ) as opened:
        yield partial(
            record_batch,
            opened,
            max_new_tokens=settings.max_new_tokens,
            decoding=how.decoding,
            batch_size=settings.batch_size,
            spool=scratch,
        )


def _by_vllm(
    settings: RecordSettings,
    how: _HowToRecord,
    fitted: "FittedPrompts",
    out: Path,
    on_progress: Callable[[int, int], None],
) -> "TraceFolder":
    from ...calibration.traces.stored_features import storage_of
    from ...calibration.vllm.vllm_recording import Offline, Served, record_with_vllm

    source: Served | Offline = Offline(arguments=dict(settings.engine_args or {}))
    if settings.server:
        assert settings.shared is not None  # see `RecordSettings.check`
        source = Served(
            urls=settings.server,
            folder=Path(settings.shared),
            on_warning=settings.listener.warning,
        )
    plan = _vllm_plan(settings, how, fitted)
    return record_with_vllm(
        plan,
        source,
        out,
        table_ids=how.table_ids,
        storage=storage_of(settings.feature_storage),
        on_progress=on_progress,
    )


def _vllm_plan(
    settings: RecordSettings, how: _HowToRecord, fitted: "FittedPrompts"
) -> "RecordingPlan":
    from ...calibration.vllm.recording_plan import RecordingPlan

    return RecordingPlan(
        target=Path(settings.target),
        shape=shape_of(settings),
        prompts=fitted.prompts,
        too_long=fitted.too_long,
        dataset=fitted.dataset,
        max_new_tokens=settings.max_new_tokens,
        decoding=how.decoding,
        aux_layer_ids=how.aux_layer_ids,
        fuse_with=how.fuse_with,
        dtype=settings.computes_in,
        most_in_flight=settings.batch_size,
    )


def _all_turns(
    settings: RecordSettings, prompts: "Sequence[Prompt]", record: "Record"
) -> "TraceFolder":
    """Record conversations, and say how far they went."""
    from ...calibration.recording.conversations import record_conversations

    assert settings.out is not None  # see `RecordSettings.check`
    report = record_conversations(
        prompts,
        Path(settings.target),
        Path(settings.out),
        record,
        max_new_tokens=settings.max_new_tokens,
    )
    turns = ", ".join(f"{count} prompts" for count in report.num_turns)
    settings.listener.note(f"turn by turn: {turns}")
    if report.num_cut_short:
        settings.listener.note(
            f"{report.num_cut_short} conversations end before their last turn, which the target"
            " has no positions for"
        )
    return report.traces


# ---- `draftquant record`: what a target does on prompts, for calibration and replay

VERB = record


def run(options: argparse.Namespace) -> int:
    """Record, and print what was written; or print the command of a server."""
    done = record.run(options.settings)
    if isinstance(done, str):
        if options.json:
            print_json({"command": done})
        else:
            print_document(done)
    elif options.json:
        print_json(written(done))
    else:
        _print_traces(done)
    return 0


def _print_traces(traces: "TraceFolder") -> None:
    print_written(traces)
    if tables := traces.manifest.tables:
        head = f"{traces.manifest.target.vocab_size:,} x {tables.width:,}"
        stdout().line(
            f"{tables.file}: embedding {tables.num_token_ids:,} x {tables.width:,}, head {head},"
            f" {megabytes(tables.nbytes)}"
        )
