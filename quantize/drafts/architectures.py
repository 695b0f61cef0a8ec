"""Names of architectures that mean the same draft, and the kinds of drafts that no family reads.

Sources: `models/registry.py` of vLLM 0.33.0, and its `EAGLEConfig`, which puts "Eagle3" before the
name of an ordinary model; `EntryClass` of SGLang 0.5.23; TensorRT-LLM; the trainers. What no name
tells of a kind, tensors do.

Kimi-Linear's config.json says `num_nextn_predict_layers` 0, which vLLM 0.33 and SGLang 0.5.23 take
for its default (`configs/kimi_linear.py:49`, `:55`); none of its classes serves that layer. Of
MiMo-V2's three layers vLLM serves the first alone, fed with its own output (`mimo_v2_mtp.py:37`),
SGLang all, each fed with the target's state (`multi_layer_eagle_worker_v2.py:196`).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ...recipes.packages import table_beside
from ..files.safetensors_header import TensorInfo
from .config_reader import object_at

_TABLE = table_beside(__file__)
KNOWN_TO_BOTH = frozenset(_TABLE["known_to_both"])
OTHER_NAMES: Mapping[str, str] = {**_TABLE["of_drafts"], **_TABLE["of_models"]}
"""Of drafts -> the one that the families read, and that most engines have."""
MARKS: Mapping[str, str] = _TABLE["marks"]
REWRITTEN_BY_VLLM: Mapping[str, str] = _TABLE["rewritten_by_vllm"]


def declared_architecture(config: Mapping[str, Any]) -> str:
    """The one name in architectures of a config.json; "" where there is not exactly one."""
    declared = config.get("architectures")
    names = declared if isinstance(declared, list) else []
    return names[0] if len(names) == 1 and isinstance(names[0], str) else ""


def with_family_name(
    config: Mapping[str, Any], tensors: Collection[str], projectors: Mapping[str, str]
) -> Mapping[str, Any]:
    """A config.json under the name that the families read, where it has another one.

    `projectors`: projector_type of a DFlashDraftModel, as ModelOpt names all of its block drafts ->
    the name that the family reads.
    """
    name = declared_architecture(config)
    projector = projector_type(config)
    if name == "DFlashDraftModel" and projector in tuple(projectors):  # of any JSON type
        return {**config, "architectures": [projectors[projector]]}
    ordinary = name in _TABLE["of_models"] and not any(
        t.endswith("hidden_norm.weight") for t in tensors
    )
    read_as = name if ordinary else OTHER_NAMES.get(name, name)
    if any(tensor.endswith("mask_hidden") for tensor in tensors):
        read_as = _TABLE["with_mask"].get(read_as, read_as)
    return config if read_as == name else {**config, "architectures": [read_as]}


def projector_type(config: Mapping[str, Any]) -> Any:
    """Of a block draft; that of dflash_config goes first: SGLang 0.5.23 `dflash_utils.py:727`."""
    return {**config, **object_at(config, "dflash_config")}.get("projector_type")


SUPPORTED: str = _TABLE["supported"]


WHOLE_MODEL = "a whole language model"


class Kind(NamedTuple):
    """What a draft is that is not supported: no single tensor or key is to blame."""

    name: str
    what: str
    fix: str
    in_config: bool = False


_FC = re.compile(r"(^|[._])fc\.")
"""Of speculators' `fusion_fc` too, and of codes."""


def kind_by_config(config: Mapping[str, Any], tensors: Collection[str]) -> Kind | None:
    """A draft that calls itself as others do, or nothing, and is Medusa, EAGLE-1 or Domino."""
    if (name := _by_config(config, tensors)) is None:
        return None
    return Kind(name, f"architectures: it is {name}", SUPPORTED, in_config=True)


def _by_config(config: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    name = declared_architecture(config) or declared_architecture(nested_eagle_keys(config) or {})
    if name == "MedusaModel" or (not name and "medusa_num_heads" in config):
        return "Medusa"
    domino = projector_type(config) == "domino" or any("prefix_gru." in name for name in tensors)
    if name == "DominoDraftModel" or (name == "DFlashDraftModel" and domino):
        return "Domino"
    if config.get("speculators_model_type") == "eagle":
        return "EAGLE-1"
    if any(tensor.endswith("hidden_norm.weight") for tensor in tensors):
        return None
    has_fc = any(map(_FC.search, tensors))
    as_target = name in _TABLE["named_as_target"] and has_fc
    return "EAGLE-1" if as_target or name in _TABLE["eagle1"] else None


def kind_by_name(architecture: str, tensors: Collection[str]) -> Kind | None:
    """What a draft is whose architecture no family has; None where that is not known."""
    by_name, by_tensors = _TABLE["kinds_by_name"], _TABLE["kinds_by_tensors"]
    named = [kind for part, kind in by_name if re.search(part, architecture, re.IGNORECASE)]
    if any(name.endswith("hidden_norm.weight") for name in tensors):  # which no EAGLE-1 has
        named = [kind for kind in named if not kind.startswith("EAGLE-1")]
    told = [kind for part, kind in by_tensors if any(re.search(part, t) for t in tensors)]
    if not named and not told:
        return None
    layers = (k for mark, k in MARKS.items() if any(re.search(mark, name) for name in tensors))
    name = [*named, *told][0].format(next(layers, "layers of another kind"))
    what = f"no supported draft family has {architecture!r}: it is {name}, which is not supported"
    return Kind(name, f"architectures: {what}", SUPPORTED if named else "", in_config=True)


def kind_by_marks(family: str, relatives: Mapping[str, str], tensors: Iterable[str]) -> Kind | None:
    """What a draft is whose tensors have the mark of another kind than its family's."""
    for name in tensors:
        for mark, kind in relatives.items():
            if match := re.search(mark, name):
                what = f"{name}: no tensor of {family}; {match[0]!r} is the mark of {kind}"
                return Kind(kind, what, SUPPORTED)
    return None


def packed_by_mlx(tensors: Mapping[str, TensorInfo]) -> Kind | None:
    """What MLX quantized, whatever config.json says of it.

    `mlx.nn.QuantizedLinear` of MLX 0.29 stores words of 32 bits as weight, beside scales, and
    biases in its affine mode; config.json says {group_size, bits, mode}, without a quant_method.
    """
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dtype == "U32" and module != name and f"{module}.scales" in tensors:
            what = "packed by MLX, whose format neither draftquant nor vLLM or SGLang reads"
            return Kind("in MLX's format", f"{name}: {what}", _TABLE["out_of_mlx"])
    return None


def nested_eagle_keys(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The keys of a draft that stand under "model", in vLLM's own form; None where none do.

    Source: `EAGLEConfig` of vLLM 0.33 writes `{"model_type": "eagle", "model": {...}}` for a draft
    that it has renamed, and reads it again; SGLang 0.5.23 knows no such model_type.
    """
    inner = config.get("model")
    return inner if isinstance(inner, Mapping) and "hidden_size" in inner else None
