"""`record`, whole: reads prompts, and transformers, vLLM or a cluster records them."""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from ...quantize.drafts import read_config
from ...quantize.drafts.config_reader import with_text_config
from ...quantize.files.checkpoint import CONFIG_FILE, Checkpoint
from ...quantize.files.hub import folder_of
from ...quantize.pairing.inherited import rotated_by
from ...quantize.stored.loading import load_draft
from ...recipes.brief import counted
from ...recipes.listener import SILENT, Unit, beyond_kept
from ..passes.devices import resolve_device
from ..passes.draft_inputs import mask_token_ids
from ..passes.ray_tasks import Placed, ray_tasks
from ..prompts.prompt_file import Prompt, PromptEncoder
from ..prompts.prompt_source import ReadPrompts, chosen_prompts
from ..recording.conversations import Record, record_conversations, recorded_texts
from ..recording.decoding import Decoding
from ..recording.record_traces import FixedBatch, RecordedBatch, record_batch, record_traces
from ..recording.target_model import Placement, configured_shape, opened_target
from ..recording.target_shape import (
    RecordingPlan,
    TargetShape,
    check_draft_fits,
    config_of,
    end_token_ids,
    fitted_prompts,
)
from ..traces.manifest import MANIFEST_FILE
from ..traces.stored_features import storage_of
from ..traces.target_tables import TargetTables
from ..traces.trace_folder import TraceFolder, file_sha256
from ..vllm.kept_recording import EngineSetup
from ..vllm.vllm_recording import Offline, Served, record_with_vllm
from .record_asked import RecordRun


def record_asked(asked: RecordRun) -> TraceFolder | str:
    """Record the prompts, or give the command of a vLLM server to record from."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one bar is enough
    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # missing weights are our error
    _warn_of_a_rotated_target(asked)
    device = resolve_device(asked.device)
    plan = _with_prompts(_plan(asked, device), asked)
    if asked.print_server_args:
        assert asked.shared is not None  # see `RecordRun.check`
        return EngineSetup(plan, Path(asked.shared), dict(asked.engine_args or {})).command()
    assert asked.out is not None  # as above
    unit: Unit = "items" if asked.engine == "vllm" else "work"
    turns = itertools.count(1)
    with ExitStack() as stack:
        elsewhere = stack.enter_context(_ray(asked, device)) if asked.ray else None
        bar = stack.enter_context(asked.listener.bar("record", len(plan.prompts), unit))

        def records(some: Sequence[Prompt], folder: Path) -> TraceFolder:
            these = dataclasses.replace(plan, prompts=tuple(some))
            if asked.turns == "all":
                bar.phase(f"record turn {next(turns)}", len(some), unit)
            if asked.engine == "vllm":
                show = beyond_kept(bar)
                return record_with_vllm(these, _source(asked), folder, on_progress=show)
            return record_traces(
                these,
                folder,
                fixed_batches=asked.fixed_batches,
                placement=Placement(device=device, device_map=asked.device_map),
                elsewhere=elsewhere,
                on_progress=bar.set,
                on_note=asked.listener.note,
            )

        if asked.turns == "all":
            return _all_turns(asked, plan, records)
        return records(plan.prompts, Path(asked.out))


def _warn_of_a_rotated_target(asked: RecordRun) -> None:
    kind = rotated_by(with_text_config(config_of(Path(asked.target))).get("quantization_config"))
    if kind is not None:
        asked.listener.warning(
            f"{asked.target}: its residual stream is rotated ({kind}), and so are the hidden states"
            " that are recorded: a draft that was trained on the target before accepts almost"
            " nothing on these traces; record that target instead"
        )


def _plan(asked: RecordRun, device: torch.device) -> RecordingPlan:
    shape, given, fuse_with = shape_of(asked), asked.aux_layer_ids, None
    aux_layer_ids = None if given is None else tuple(given)
    table_ids = tuple(asked.table_ids)
    if asked.draft:
        folder = folder_of(asked.draft)
        _, geometry = read_config(Checkpoint.open(folder))
        check_draft_fits(folder.name, geometry, shape, aux_layer_ids)
        aux_layer_ids = aux_layer_ids or geometry.aux_layer_ids
        table_ids += mask_token_ids(geometry)
        if asked.fused:
            dtype = getattr(torch, asked.computes_in)
            shared = TargetTables.find(Path(asked.target)).shared(None, device)
            fuse_with = load_draft(folder, dtype=dtype, device=device, compact=True, shared=shared)
    return RecordingPlan(
        target=Path(asked.target),
        shape=shape,
        prompts=(),
        max_new_tokens=asked.max_new_tokens,
        decoding=Decoding(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            seed=asked.seed,
            logprobs=asked.logprobs,
            num_top_logprobs=asked.top_logprobs,
            ignore_eos=asked.ignore_eos,
        ),
        aux_layer_ids=aux_layer_ids,
        fuse_with=fuse_with,
        dtype=asked.computes_in,
        stored=asked.stored_in,
        storage=storage_of(asked.feature_storage),
        table_ids=table_ids if asked.tables else None,
        batch_size=asked.batch_size,
    )


def _ray(
    asked: RecordRun, device: torch.device
) -> AbstractContextManager[Placed[FixedBatch, RecordedBatch]]:
    """Inside the block, the requested cluster records fixed batches."""
    assert asked.ray is not None  # the caller checks
    sent = dataclasses.replace(
        asked,
        listener=SILENT,
        device=device.type,
        target=Path(asked.target).absolute(),
        draft=asked.draft and folder_of(asked.draft).absolute(),
    )
    return ray_tasks(asked.ray, device, partial(_open_recording, sent))


@contextmanager
def _open_recording(asked: RecordRun) -> Iterator[Callable[[FixedBatch], RecordedBatch]]:
    """In a worker: load the target; the yielded function records a batch."""
    device, scratch = resolve_device(asked.device), Path(tempfile.gettempdir())
    plan, placement = _plan(asked, device), Placement(device=device)
    with opened_target(plan, placement, beside=scratch) as opened:
        yield partial(record_batch, opened, plan, scratch)


def _source(asked: RecordRun) -> Served | Offline:
    if not asked.server:
        return Offline(arguments=dict(asked.engine_args or {}))
    assert asked.shared is not None  # see `RecordRun.check`
    warn = asked.listener.warning
    return Served(urls=asked.server, folder=Path(asked.shared), on_warning=warn)


def _all_turns(asked: RecordRun, plan: RecordingPlan, record: Record) -> TraceFolder:
    assert asked.out is not None  # see `RecordRun.check`
    report = record_conversations(plan, Path(asked.out), record)
    turns = ", ".join(counted(count, "prompt") for count in report.num_turns)
    asked.listener.note(f"turn by turn: {turns}")
    if report.num_cut_short:
        asked.listener.note(
            f"{report.num_cut_short} conversations end before their last turn, which the target"
            " has no positions for"
        )
    return report.traces


def _with_prompts(plan: RecordingPlan, asked: RecordRun) -> RecordingPlan:
    """The plan with the prompts to record, and a message about those that are too long."""
    shape = plan.shape
    given = _read(asked, shape)
    read = given.prompts
    fitted, long = fitted_prompts(read, shape, asked.max_new_tokens, asked.too_long, asked.prompts)
    if long:
        done = "left out" if long.skipped else "cut to their last tokens"
        names = long.skipped or long.truncated
        verb = "is" if len(names) == 1 else "are"
        asked.listener.warning(
            f"{asked.prompts}: {len(names)} of {len(read)} prompts {verb} {done}: with"
            f" {asked.max_new_tokens} new tokens they exceed the target's {shape.max_positions}"
            f" positions ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
        )
        if long.truncated and asked.continued and any(p.conversation_sha256 for p in read):
            asked.listener.warning(
                f"{asked.prompts}: a text that is cut no longer begins as its conversation did:"
                " gate judges it only in one folder with the traces that began it (traces merge)"
            )
    return dataclasses.replace(plan, prompts=fitted, too_long=long, dataset=given.dataset)


def _read(asked: RecordRun, shape: TargetShape) -> ReadPrompts:
    encoder = PromptEncoder(Path(asked.target), continues=asked.continued)
    if asked.continued and (Path(asked.prompts) / MANIFEST_FILE).is_file():
        return ReadPrompts(prompts=_recorded_texts(asked, shape))
    read = chosen_prompts(asked.prompts, encoder, asked)
    longer = sum(bool(prompt.later_turns) for prompt in read.prompts)
    if longer and asked.turns == "first":
        asked.listener.note(
            f"{asked.prompts}: {longer} of {len(read.prompts)} prompts have later turns of the"
            " user, which follow the target's answer: the first turn is recorded (--turns all:"
            " each)"
        )
    return read


def _recorded_texts(asked: RecordRun, shape: TargetShape) -> tuple[Prompt, ...]:
    """Texts of a trace folder, and a message on those that have ended or are another target's."""
    target, traces = Path(asked.target), TraceFolder.open(Path(asked.prompts))
    ends = frozenset[int]() if asked.ignore_eos else end_token_ids(target)
    texts = recorded_texts(traces, shape.vocab_size, ends, asked)
    if texts.ended:
        named = ", ".join(texts.ended[:3]) + (", ..." if texts.ended[3:] else "")
        asked.listener.warning(
            f"{asked.prompts}: {len(texts.ended)} of {len(traces)} texts end with the target's"
            f" end of text, and are left out ({named})"
        )
    recorded = traces.manifest.target
    if recorded.config_sha256 not in (None, file_sha256(target / CONFIG_FILE)):
        asked.listener.warning(
            f"{asked.prompts}: the texts are of the target {recorded.name}, whose {CONFIG_FILE}"
            f" is another than that of {target.name}: they are given, and not its own"
        )
    return texts.prompts


def shape_of(asked: RecordRun) -> TargetShape:
    """Sizes of the target before its weights are read; an engine may know more kinds of targets."""
    read = TargetShape.read if asked.engine == "vllm" else configured_shape
    return read(Path(asked.target))
