"""A target that transformers runs: loaded on one device, or spread over all available ones."""

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ...quantize.stored.loading import CPU, LoadedDraft
from ...recipes.errors import TraceError, first_line
from ...recipes.installing import install_line
from ..traces.manifest import FeatureSpec, TargetIdentity
from ..traces.prompt_trace import FEATURE_DTYPES
from .decoding import Fuse
from .target_shape import RecordingPlan, TargetShape, config_of, target_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a target runs; a map: over all GPUs, then the CPU, then the disk (accelerate)."""

    device: torch.device = CPU
    device_map: Literal["auto"] | None = None
    max_memory: Mapping[int | str, int] | None = None  # bytes by GPU or "cpu"; None = all free


ON_CPU = Placement()


@contextmanager
def loaded_target(
    target: Path, dtype: torch.dtype, placement: Placement, *, beside: Path
) -> Iterator[Any]:
    """A causal language model for evaluation, without remote code and with all weights."""
    if placement.device_map is None:
        yield _placed(_load(target, dtype, {}), target, placement.device)
        return
    if importlib.util.find_spec("accelerate") is None:
        install = install_line("accelerate")
        raise TraceError(
            "--device-map",
            "it needs the package accelerate, which is not installed, to spread a target over"
            " devices",
            fix=f"{install}, or choose one --device",
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
            f"the target does not fit on {device} in {str(model.dtype).removeprefix('torch.')}",
            fix="spread it with --device-map auto, or record in a narrower --dtype",
        ) from exc


def _load(target: Path, dtype: torch.dtype, spread: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    config_of(target)
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
    """Sizes of a target as transformers reads its config.json, before any weight is read."""
    from transformers import AutoConfig

    config_of(target)
    try:
        config = AutoConfig.from_pretrained(target, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        return shape_of(text, text.num_hidden_layers)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as exc:
        raise _cannot_load(target, exc) from exc


def shape_of(config: Any, num_layers: int) -> TargetShape:
    """Sizes by a text config of transformers, with that many layers."""
    return TargetShape(
        num_layers=num_layers,
        vocab_size=config.vocab_size,
        hidden_size=int(config.hidden_size),
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def _cannot_load(target: Path, exc: Exception) -> TraceError:
    first = first_line(exc)
    return TraceError(
        target,
        f"transformers cannot load this target: {first}",
        fix="give a local causal language model in safetensors",
    )


def decoder_layers(model: Any, target: Path) -> nn.ModuleList:
    """The decoder layers of a loaded target."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TraceError(
            target,
            f"transformers' {type(model).__name__} has no list of decoder layers to record from",
            fix="record with vLLM (--engine vllm), or import a dump (draftquant traces import)",
        )
    return layers


def input_device(model: Any) -> torch.device:
    """The device that reads token ids; the hooks of a spread target move them on."""
    device: torch.device = model.get_input_embeddings().weight.device
    return CPU if device.type == "meta" else device  # offloaded: its hook fetches it


def cache_argument(model: Any) -> str:
    """The argument of a forward pass that is its KV cache: `past_key_values` before 5.24."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """For tokens [B, t]: features [B, t, width], top1 [B, t] int64, and last_logits [B, V]."""

    features: Tensor
    top1: Tensor
    last_logits: Tensor


class RecordedTarget:
    """The target with hooks after its aux layers; leaving the block removes the hooks."""

    def __init__(
        self, model: Any, layers: nn.ModuleList, aux_layer_ids: Sequence[int], *, last_state: bool
    ) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.device = input_device(model)
        self._cache_argument = cache_argument(model)
        self.width = len(aux_layer_ids) * int(self.config.hidden_size)
        self._layers = layers
        self._last_state = last_state
        self._ids = tuple(aux_layer_ids)
        self._captured: dict[int, Tensor] = {}
        self._hooks = ExitStack()
        ends = model.generation_config.eos_token_id if model.generation_config else None
        ends = self.config.eos_token_id if ends is None else ends
        self.ends = torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def __enter__(self) -> "RecordedTarget":
        for i in self._ids:
            head, keep = self.model.get_output_embeddings(), self._keep(i)
            handle = (
                head.register_forward_pre_hook(keep)
                if self._last_state
                else self._layers[i].register_forward_hook(keep)
            )
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def run(self, token_ids: Tensor, cache: Any, given: dict[str, Tensor]) -> Ran:
        """Run it on tokens [B, t], all of which end in the last column."""
        given = {**given, self._cache_argument: cache}
        ran = self.model(input_ids=token_ids, use_cache=True, **given)
        parts = [self._captured.pop(i).to(self.device) for i in self._ids]
        return Ran(
            features=parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1),
            top1=ran.logits.argmax(-1).to(self.device),
            last_logits=ran.logits[:, -1].to(self.device),
        )

    def _keep(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Any, output: Any = None) -> None:
            # An output is a Tensor in transformers 5, a tuple before. None leaves it unchanged.
            hidden = inputs if output is None else output
            self._captured[layer] = hidden if isinstance(hidden, Tensor) else hidden[0]

        return hook


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTarget:
    """A target that is ready to continue prompts; without `fuse` features stay as they are."""

    recorded: RecordedTarget
    identity: TargetIdentity
    features: FeatureSpec
    fuse: Fuse | None


@contextmanager
def opened_target(
    plan: RecordingPlan, placement: Placement, *, beside: Path
) -> Iterator[OpenedTarget]:
    """Load a target and hook its layers; leaving the block removes the hooks."""
    dtype = FEATURE_DTYPES[plan.dtype][0]
    with loaded_target(plan.target, dtype, placement, beside=beside) as model:
        layers = decoder_layers(model, plan.target)
        shape = shape_of(model.config.get_text_config(), len(layers))
        identity = target_identity(plan.target, shape)
        features = dataclasses.replace(plan, shape=shape).features
        ids, draft = features.aux_layer_ids, plan.fuse_with
        with RecordedTarget(model, layers, ids, last_state=plan.reads_last_state) as recorded:
            yield OpenedTarget(
                recorded=recorded,
                identity=identity,
                features=features,
                fuse=None if draft is None else partial(_fused, draft),
            )


def _fused(draft: LoadedDraft, features: Tensor) -> Tensor:
    return draft.forward.fuse(features[None].to(draft.device))[0]
