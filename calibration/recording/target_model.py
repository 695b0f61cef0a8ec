"""A target that transformers runs: loaded on one device, or spread over all that there are."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from ...quantize.errors import CheckpointError
from ...quantize.files.checkpoint import CONFIG_FILE, read_json_object
from ...quantize.files.hub import no_target
from ...quantize.stored.loading import CPU
from ...recipes.errors import first_line
from ...recipes.install_line import install_line
from ..errors import TraceError
from .target_shape import TargetShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a target runs.

    Attributes:
        device: of the whole target, unless it is spread.
        device_map: "auto" = spread it instead, layer by layer, with accelerate: over all GPUs, then
            the CPU, then the disk.
        max_memory: bytes to use of each GPU, by number, and of "cpu"; None = what is free.
    """

    device: torch.device = CPU
    device_map: Literal["auto"] | None = None
    max_memory: Mapping[int | str, int] | None = None


ON_CPU = Placement()


@contextmanager
def loaded_target(
    target: Path, dtype: torch.dtype, placement: Placement, *, beside: Path
) -> Iterator[Any]:
    """A causal language model for evaluation, without remote code.

    Args:
        placement: where it runs.
        beside: where a hidden folder may hold weights of a spread target that the disk has in
            another form (experts one by one, say); it is removed at the end.

    Raises:
        TraceError: it cannot be loaded or placed, or weights are missing.
    """
    if placement.device_map is None:
        yield _placed(_load(target, dtype, {}), target, placement.device)
        return
    if importlib.util.find_spec("accelerate") is None:
        raise TraceError(
            "--device-map",
            "it needs the package accelerate, which is not installed, to spread a"
            " target over devices",
            fix=f"{install_line('accelerate')}, or choose one --device",
        )
    limits = dict(placement.max_memory) if placement.max_memory else None
    with TemporaryDirectory(prefix=".offloaded-", dir=beside) as folder:
        spread = {"device_map": placement.device_map, "max_memory": limits}
        yield _load(target, dtype, {**spread, "offload_folder": folder})


def _placed(model: Any, target: Path, device: torch.device) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError as exc:
        raise TraceError(
            target,
            f"the target does not fit on {device} in {model.dtype}".replace("torch.", ""),
            fix="spread it with --device-map auto, or record in a narrower --dtype",
        ) from exc


def _load(target: Path, dtype: torch.dtype, spread: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    _check_config(target)
    try:
        # transformers 5.23 does not annotate the pair that output_loading_info gives.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            target,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **spread,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError,
            ArithmeticError, AssertionError, ImportError, SafetensorError) as exc:  # fmt: skip
        raise _cannot_load(target, exc) from exc
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would go on with random weights
        raise TraceError(target, f"{len(missing)} weight(s) are missing, such as {missing[0]}",
                         fix="give the target itself, or download it again; a draft is"
                         " given behind --draft")  # fmt: skip
    return model.eval()


def configured_shape(target: Path) -> TargetShape:
    """Sizes of a target as transformers reads its config.json, before any weight is read.

    Raises:
        TraceError: transformers does not know it, or it has no such sizes.
    """
    from transformers import AutoConfig

    _check_config(target)
    try:
        config = AutoConfig.from_pretrained(target, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        return shape_of(text, text.num_hidden_layers)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as exc:
        raise _cannot_load(target, exc) from exc


def shape_of(config: Any, num_layers: int) -> TargetShape:
    """Sizes by a text config of transformers, and as many layers."""
    return TargetShape(
        num_layers=num_layers,
        vocab_size=config.vocab_size,
        hidden_size=int(config.hidden_size),
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def _check_config(target: Path) -> None:
    try:
        read_json_object(target / CONFIG_FILE, no_target(target))
    except CheckpointError as exc:
        raise TraceError(exc.where, exc.what, fix=exc.fix) from exc


def _cannot_load(target: Path, exc: Exception) -> TraceError:
    first = first_line(exc)
    return TraceError(
        target,
        f"transformers cannot load this target: {first}",
        fix="give a local causal language model in safetensors",
    )


def decoder_layers(model: Any, target: Path) -> nn.ModuleList:
    """The decoder layers of a loaded target.

    Raises:
        TraceError: it has no list of them.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TraceError(
            target,
            f"transformers' {type(model).__name__} has no list of decoder layers to record from",
            fix="record with vLLM (--engine vllm), or import a dump (draftquant traces import)",
        )
    return layers


def input_device(model: Any) -> torch.device:
    """Where token ids are read; the hooks of a spread target move them on."""
    device: torch.device = model.get_input_embeddings().weight.device
    return CPU if device.type == "meta" else device  # offloaded: its hook fetches it
