"""What engines would do with the result of a plan, before anything is written."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..drafts import Row
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import StoredTensor, TensorInfo
from ..layouts import get_layout
from ..quantization_plan import Plan
from .contract import EngineCheck


def planned_checkpoint(plan: Plan, *, fix_config: bool = False) -> Checkpoint:
    """The folder that a plan would write, as its headers and config.json will be.

    With `fix_config` the lints of the draft have corrected config.json, as `quantize_draft` does.
    Kept tensors lie where they lie in the source, so that what is read of them can be read; those
    of quantized linears have names, dtypes and shapes, and no bytes.
    """
    from ..lints import fixed_config, output_changes  # numpy, for vocabulary maps

    source = plan.draft.checkpoint
    tensors: dict[str, TensorInfo] = {}
    for step in plan.steps:
        if step.action == "drop":
            continue
        if step.action != "quantize":
            tensors[step.row.tensor.name] = step.row.tensor
            continue
        tensors |= _unwritten(step.stored, step.row)
    for output in plan.cache:
        tensors |= _unwritten(output.stored, output.row)
    changes = output_changes(plan.draft, plan.remaining, fix_config=fix_config)
    return replace(
        source,
        config={**fixed_config(source.config, changes), "quantization_config": plan.declared()},
        tensors=dict(sorted(tensors.items())),
        subtree=None,  # a folder of its own
    )


def _unwritten(stored: Sequence[StoredTensor], row: Row) -> Iterator[tuple[str, TensorInfo]]:
    """Headers of what a row is to become, in the file of that."""
    for part in stored:
        info = TensorInfo(
            name=part.name,
            dtype=part.dtype,
            shape=part.shape,
            file=row.tensor.file,
            start=0,
            stop=part.nbytes,
        )
        yield part.name, info


def planned_verdicts(
    plan: Plan,
    *,
    arch: str | None = None,
    tp: int = 1,
    target_layers: int | None = None,
    fix_config: bool = False,
) -> tuple[EngineCheck, ...]:
    """What each known engine does with the result on each of its GPUs.

    Args:
        arch: this GPU alone; None = all that each engine is known on.
        target_layers: see `check_draft`.
        fix_config: see `planned_checkpoint`.

    Raises:
        CheckpointError: `target_layers` is not what config.json says.
    """
    checkpoint = planned_checkpoint(plan, fix_config=fix_config)
    layout = get_layout(plan.recipe.layout)
    side_files: Mapping[str, object] = layout.side_files(checkpoint.config["quantization_config"])
    return verdicts_of(
        checkpoint, arch=arch, tp=tp, target_layers=target_layers, has_side_file=bool(side_files)
    )


def verdicts_of(
    checkpoint: Checkpoint,
    *,
    arch: str | None = None,
    tp: int = 1,
    target_layers: int | None = None,
    has_side_file: bool = False,
) -> tuple[EngineCheck, ...]:
    """The same of a folder as its headers and config.json are, or would be.

    Args:
        arch: see `planned_verdicts`.
        target_layers: see `check_draft`.

    Raises:
        CheckpointError: see `planned_verdicts`.
    """
    from .engine_check import check_checkpoint
    from .registry import newest_engines

    return tuple(
        check_checkpoint(
            checkpoint,
            engine=engine.name,
            arch=each,
            tp=tp,
            target_layers=target_layers,
            has_side_file=has_side_file,
        )
        for engine in newest_engines()
        for each in (engine.gpus if arch is None else (arch,))
        if each in engine.gpus
    )
