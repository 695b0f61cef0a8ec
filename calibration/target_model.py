"""A target that transformers runs: loaded on one device, or spread over all that there are."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from ..quantize.errors import CheckpointError
from ..quantize.files.checkpoint import CONFIG_FILE, read_json_object
from ..quantize.stored.loading import CPU
from .errors import TraceError


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


def load_target(target: Path, dtype: torch.dtype, placement: Placement = ON_CPU) -> Any:
    """Load a causal language model for evaluation, without remote code.

    Args:
        target: local folder with safetensors weights.
        dtype: of its weights and computation.
        placement: where it runs.

    Raises:
        TraceError: it cannot be loaded or placed, or weights are missing.
    """
    from transformers import AutoModelForCausalLM

    try:
        read_json_object(target / CONFIG_FILE, "give a local target folder")
    except CheckpointError as exc:
        raise TraceError(exc.where, exc.what, fix=exc.fix) from exc
    spread: dict[str, Any] = {}
    if placement.device_map:
        _check_accelerate()
        limits = dict(placement.max_memory) if placement.max_memory else None
        spread = {"device_map": placement.device_map, "max_memory": limits}
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
        model, report = loaded
        if not spread:
            model.to(placement.device)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError,
            ArithmeticError, AssertionError, ImportError, SafetensorError) as exc:  # fmt: skip
        first = (str(exc).strip() or repr(exc)).splitlines()[0]
        small = isinstance(exc, torch.OutOfMemoryError)
        raise TraceError(
            target,
            f"transformers cannot load this target: {first}",
            fix="spread it with --device-map auto, or record in a narrower --dtype"
            if small
            else "give a local causal language model in safetensors",
        ) from exc
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would go on with random weights
        raise TraceError(target, f"{len(missing)} weight(s) are missing, first {missing[0]}",
                         fix="download the target again")  # fmt: skip
    return model.eval()


def decoder_layers(model: Any, target: Path) -> nn.ModuleList:
    """The decoder layers of a loaded target.

    Raises:
        TraceError: it has no list of them.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TraceError(target, f"{type(model).__name__} has no list of decoder layers",
                         fix="record with a server, or convert a dump")  # fmt: skip
    return layers


def input_device(model: Any) -> torch.device:
    """Where token ids are read; the hooks of a spread target move them on."""
    device: torch.device = model.get_input_embeddings().weight.device
    return CPU if device.type == "meta" else device  # offloaded: its hook fetches it


def _check_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise TraceError(
            "--device-map",
            "spreads a target with the package accelerate, which is not installed",
            fix="pip install 'draftquant[accelerate]', or choose one --device",
        )
