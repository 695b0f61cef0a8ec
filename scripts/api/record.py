"""`record`: what a target does on prompts, for calibration and replay."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...quantize.drafts import read_config
from ...quantize.files.checkpoint import Checkpoint
from .opening import Reference, folder_of, optional_path
from .record_settings import RecordEngine, RecordSettings, Turns
from .watch import SILENT, Watch

if TYPE_CHECKING:
    import torch

    from ...calibration.prompts.prompt_file import Prompt
    from ...calibration.recording.conversations import Record
    from ...calibration.recording.decoding import Decoding
    from ...calibration.recording.prompt_fit import FittedPrompts, TooLong
    from ...calibration.recording.target_shape import TargetShape
    from ...calibration.traces.manifest import FeatureDtype
    from ...calibration.traces.trace_folder import TraceFolder
    from ...calibration.vllm.recording_plan import RecordingPlan
    from ...quantize.stored.loading import LoadedDraft


def record(
    target: str | Path,
    prompts: str | Path,
    out: str | Path,
    *,
    draft: Reference | None = None,
    fused: bool = False,
    aux_layer_ids: tuple[int, ...] | None = None,
    tables: bool = False,
    table_ids: tuple[int, ...] = (),
    turns: Turns = "first",
    too_long: "TooLong" = "error",
    max_new_tokens: int = 128,
    ignore_eos: bool = False,
    temperature: float = 0,
    top_p: float = 1,
    top_k: int = 0,
    seed: int = 0,
    logprobs: bool = False,
    top_logprobs: int = 0,
    dtype: "FeatureDtype | None" = None,
    batch_size: int = 32,
    device: str = "auto",
    device_map: Literal["auto"] | None = None,
    engine: RecordEngine = "transformers",
    engine_args: Mapping[str, object] | None = None,
    server: str | None = None,
    shared: str | Path | None = None,
    watch: Watch = SILENT,
) -> "TraceFolder":
    """Let a target continue prompts, and keep what a draft would have seen of it.

    Example:
        >>> traces = dq.record(
        ...     "TARGET", "prompts.jsonl", "NEW", draft="DRAFT", max_new_tokens=8
        ... )
        >>> len(traces), traces.manifest.num_tokens > 0
        (2, True)

    Args:
        target: transformers folder (safetensors, no remote code).
        prompts: JSON lines with id, category, and token_ids, text or messages; also files of
            MT-Bench, ShareGPT and SPEED-Bench.
        out: folder to create.
        draft: see `RecordSettings`, as all that follow.
        fused: likewise.
        aux_layer_ids: likewise.
        tables: likewise.
        table_ids: likewise.
        turns: likewise.
        too_long: likewise.
        max_new_tokens: likewise.
        ignore_eos: likewise.
        temperature: likewise.
        top_p: likewise.
        top_k: likewise.
        seed: likewise.
        logprobs: likewise.
        top_logprobs: likewise.
        dtype: likewise.
        batch_size: likewise.
        device: likewise.
        device_map: likewise.
        engine: likewise.
        engine_args: likewise.
        server: likewise.
        shared: likewise.
        watch: sees how far the run is.

    Returns:
        The folder that was written, opened: its length is the number of traces.

    Raises:
        DraftQuantError: target, prompts or settings are not usable, or `out` exists.
    """
    settings = RecordSettings(
        draft=draft,
        fused=fused,
        aux_layer_ids=aux_layer_ids,
        tables=tables,
        table_ids=table_ids,
        turns=turns,
        too_long=too_long,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        dtype=dtype,
        batch_size=batch_size,
        device=device,
        device_map=device_map,
        engine=engine,
        engine_args=engine_args or {},
        server=server,
        shared=optional_path(shared),
    )
    return record_as(settings, Path(target), Path(prompts), Path(out), watch)


def record_as(
    settings: RecordSettings, target: Path, prompts: Path, out: Path, watch: Watch = SILENT
) -> "TraceFolder":
    """As `record`, by settings."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one bar is enough
    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # missing weights are our error
    settings.check()
    how = _how(settings, target)
    fitted = _fitted(settings, target, prompts, watch)
    with watch.bar("record", len(fitted.prompts)) as bar:

        def records(some: "Sequence[Prompt]", folder: Path) -> "TraceFolder":
            by = _by_vllm if settings.engine == "vllm" else _by_transformers
            these = dataclasses.replace(fitted, prompts=tuple(some))
            return by(settings, how, target, these, folder, bar.set)

        if settings.turns == "all":
            return _all_turns(settings, target, fitted.prompts, out, records, watch)
        return records(fitted.prompts, out)


def server_command(
    settings: RecordSettings, target: Path, prompts: Path, watch: Watch = SILENT
) -> str:
    """The command that starts a vLLM server which can be recorded from, for these prompts.

    Raises:
        DraftQuantError: as of `record`.
    """
    settings.check(starts_server=True)
    how = _how(settings, target)
    plan = _vllm_plan(settings, how, target, _fitted(settings, target, prompts, watch))
    assert settings.shared is not None  # see `RecordSettings.check`
    return plan.setup(settings.shared, dict(settings.engine_args)).command()


def _shape(settings: RecordSettings, target: Path) -> "TargetShape":
    """Sizes of the target before its weights are read; an engine may know more kinds of them."""
    from ...calibration.recording.target_model import configured_shape
    from ...calibration.recording.target_shape import TargetShape

    return TargetShape.read(target) if settings.engine == "vllm" else configured_shape(target)


def _fitted(settings: RecordSettings, target: Path, prompts: Path, watch: Watch) -> "FittedPrompts":
    """The prompts that are recorded, and a word on those that are too long."""
    from ...calibration.recording.prompt_fit import fitted_prompts

    read = _read(settings, target, prompts, watch)
    shape = _shape(settings, target)
    fitted = fitted_prompts(read, shape, settings.max_new_tokens, settings.too_long)
    if long := fitted.too_long:
        done = "left out" if long.skipped else "cut to their last tokens"
        names = long.skipped or long.truncated
        watch.warning(
            f"{prompts}: {len(names)} of {len(read)} prompts are {done}: with"
            f" {settings.max_new_tokens} new tokens they exceed the target's {shape.max_positions}"
            f" positions ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
        )
    return fitted


def _read(
    settings: RecordSettings, target: Path, prompts: Path, watch: Watch
) -> "Sequence[Prompt]":
    from ...calibration.prompts.prompt_file import read_prompts

    read = read_prompts(prompts, target=target)
    longer = sum(bool(prompt.later_turns) for prompt in read)
    if longer and settings.turns == "first":
        watch.note(
            f"{prompts}: {longer} of {len(read)} prompts have later turns of the user,"
            " which follow the target's answer: the first turn is recorded (--turns all: each)"
        )
    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class _HowToRecord:
    """What is recorded of every prompt, whoever runs the target; fields as in `record_traces`."""

    decoding: "Decoding"
    aux_layer_ids: tuple[int, ...] | None
    fuse_with: "LoadedDraft | None"
    table_ids: tuple[int, ...] | None
    device: "torch.device"


def _how(settings: RecordSettings, target: Path) -> _HowToRecord:
    import torch

    from ...calibration.passes.devices import resolve_device
    from ...calibration.passes.draft_inputs import mask_token_ids
    from ...calibration.recording.decoding import Decoding
    from ...calibration.recording.target_shape import check_draft_fits
    from ...calibration.traces.target_tables import TargetTables
    from ...quantize.stored.loading import load_draft

    device = resolve_device(settings.device)
    aux_layer_ids, fuse_with = settings.aux_layer_ids, None
    table_ids = settings.table_ids
    if settings.draft:
        folder = folder_of(settings.draft)
        _, geometry = read_config(Checkpoint.open(folder))
        check_draft_fits(folder.name, geometry, _shape(settings, target), aux_layer_ids)
        aux_layer_ids = aux_layer_ids or geometry.aux_layer_ids
        table_ids += mask_token_ids(geometry)
        if settings.fused:
            dtype = getattr(torch, settings.computes_in)
            shared = TargetTables.find(target).shared(None, device)
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
    target: Path,
    fitted: "FittedPrompts",
    out: Path,
    on_progress: Callable[[int, int], None],
) -> "TraceFolder":
    from ...calibration.recording.record_traces import record_traces
    from ...calibration.recording.target_model import Placement

    return record_traces(
        target,
        fitted.prompts,
        out,
        max_new_tokens=settings.max_new_tokens,
        decoding=how.decoding,
        aux_layer_ids=how.aux_layer_ids,
        fuse_with=how.fuse_with,
        dtype=settings.computes_in,
        batch_size=settings.batch_size,
        placement=Placement(device=how.device, device_map=settings.device_map),
        table_ids=how.table_ids,
        too_long=fitted.too_long,
        on_progress=on_progress,
    )


def _by_vllm(
    settings: RecordSettings,
    how: _HowToRecord,
    target: Path,
    fitted: "FittedPrompts",
    out: Path,
    on_progress: Callable[[int, int], None],
) -> "TraceFolder":
    from ...calibration.vllm.vllm_recording import Offline, Served, record_with_vllm

    source: Served | Offline = Offline(arguments=dict(settings.engine_args))
    if settings.server:
        assert settings.shared is not None  # see `RecordSettings.check`
        source = Served(url=settings.server, folder=settings.shared)
    plan = _vllm_plan(settings, how, target, fitted)
    return record_with_vllm(plan, source, out, table_ids=how.table_ids, on_progress=on_progress)


def _vllm_plan(
    settings: RecordSettings, how: _HowToRecord, target: Path, fitted: "FittedPrompts"
) -> "RecordingPlan":
    from ...calibration.vllm.recording_plan import RecordingPlan

    return RecordingPlan(
        target=target,
        shape=_shape(settings, target),
        prompts=fitted.prompts,
        too_long=fitted.too_long,
        max_new_tokens=settings.max_new_tokens,
        decoding=how.decoding,
        aux_layer_ids=how.aux_layer_ids,
        fuse_with=how.fuse_with,
        dtype=settings.computes_in,
        most_in_flight=settings.batch_size,
    )


def _all_turns(
    settings: RecordSettings,
    target: Path,
    prompts: "Sequence[Prompt]",
    out: Path,
    record: "Record",
    watch: Watch,
) -> "TraceFolder":
    """Record conversations, and say how far they went."""
    from ...calibration.recording.conversations import record_conversations

    report = record_conversations(
        prompts, target, out, record, max_new_tokens=settings.max_new_tokens
    )
    turns = ", ".join(f"{count} prompts" for count in report.num_turns)
    watch.note(f"turn by turn: {turns}")
    if report.num_cut_short:
        watch.note(
            f"{report.num_cut_short} conversations end before their last turn, which the target"
            " has no positions for"
        )
    return report.traces
