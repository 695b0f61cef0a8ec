"""The layer to graft, as its own folder describes it: which of its linears are codes."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...recipes.errors import CheckpointError
from ..drafts import Family, read_config
from ..drafts.architectures import declared_architecture
from ..drafts.config_reader import with_text_config
from ..drafts.engine_traits import MtpLayer, fused_names
from ..files.checkpoint import CONFIG_FILE, Checkpoint, mtp_layers
from ..files.digests import tensor_digest
from ..files.hub import DraftSource
from ..files.safetensors_header import TensorInfo
from ..stored.layouts.scheme import DeclaredScheme
from ..stored.stored_declaration import raw_declaration
from ..stored.stored_draft import StoredDraft

ENGINES: tuple[Literal["vllm", "sglang"], ...] = ("vllm", "sglang")
_BLOCKS = ("self_attn", "mlp")
"""The prefix of a layer's names where an engine has no name for it: SGLang for MiMo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Prefixes of names, without the dot: on disk, and those of its linears in engines.

    A declaration of the whole target about the layer's linears must mean no others, so every
    pattern begins with one of these. None where they equal those of a layer of the target.
    """

    on_disk: tuple[str, ...]
    engines: Mapping[str, tuple[str, ...] | None]

    @property
    def beginnings(self) -> tuple[str, ...]:
        """All of them, each once, sorted."""
        known = (names or () for names in self.engines.values())
        return tuple(sorted({*self.on_disk, *(name for names in known for name in names)}))

    @property
    def pattern(self) -> str:
        """A regular expression, from the start of a name, for everything in the layer."""
        return f"(?:{'|'.join(map(re.escape, self.beginnings))})\\."

    def contains(self, name: str) -> bool:
        """Whether a module of this name is in the layer, under any of its prefixes."""
        return any(name == start or name.startswith(f"{start}.") for start in self.beginnings)

    def relative(self, module: str) -> str:
        """The path of a module on disk within the layer."""
        for start in self.on_disk:
            if module.startswith(f"{start}."):
                return module[len(start) + 1 :]
        return module

    def within_layer(self, module: str) -> str:
        """The same, where engines number the layer below its prefix (Qwen)."""
        return self.relative(module).removeprefix("layers.0.")

    def everywhere(self, module: str) -> tuple[str, ...]:
        """Every name under which engines look up a module on disk, alone or fused."""
        path = self.within_layer(module)
        modules = [module]
        for names in self.engines.values():
            modules += [path if s in _BLOCKS else f"{s}.{path}" for s in names or ()]
        return tuple(dict.fromkeys([*modules, *(f for name in modules for f in fused_names(name))]))


def layer_names(
    family: Family,
    prefixes: Collection[str],
    config: Mapping[str, object],
    target_modules: Iterable[str],
) -> LayerNames:
    """Names of the MTP layers below some prefixes of a target."""
    modules = tuple(target_modules)
    traits = {"vllm": family.engine_traits.vllm.mtp, "sglang": family.engine_traits.sglang.mtp}
    engines = {}
    for engine, served in traits.items():
        names = _beginnings(served, config, len(prefixes)) if served else ()
        taken = any(name.startswith(f"{start}.") for start in names for name in modules)
        engines[engine] = None if taken else names
    return LayerNames(on_disk=tuple(sorted(prefixes)), engines=engines)


def _beginnings(served: MtpLayer, config: Mapping[str, object], count: int) -> tuple[str, ...]:
    layers = with_text_config(config).get("num_hidden_layers", 0)
    first = layers if isinstance(layers, int) else 0
    prefix = served.prefixes.get(declared_architecture(config), served.prefix)
    if not prefix:
        return _BLOCKS
    return tuple(dict.fromkeys(prefix.format(n=first + i).rstrip(".") for i in range(count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraftedLayer:
    """What a declaration must say of the layer.

    Attributes:
        declared: quantization_config of the layer's folder; None where no linear is quantized.
        quantized: modules on disk that are stored as codes. kept: the other matrices.
        scheme: the declared one for people, `format` for comparing; None where none is quantized.
    """

    declared: Mapping[str, Any] | None
    names: LayerNames
    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    scheme: str | None
    format: DeclaredScheme | None

    @property
    def method(self) -> str | None:
        """The quant_method that declares it."""
        return None if self.declared is None else str(self.declared.get("quant_method"))

    @property
    def quantized_names(self) -> tuple[str, ...]:
        """Every name under which one of its quantized linears is looked up."""
        everywhere = (self.names.everywhere(module) for module in self.quantized)
        return tuple(dict.fromkeys(name for names in everywhere for name in names))


def grafted_layer(stored: StoredDraft, names: LayerNames) -> GraftedLayer:
    """The layer of a folder whose headers and declaration were read."""
    raw = raw_declaration(stored.checkpoint)
    rows = [row for row in stored.draft.rows if len(row.tensor.shape) == 2]
    quantized = tuple(sorted(stored.modules))
    # Only those of its own linears: the declaration may be that of a whole target.
    declared = (stored.scheme_of(row) for row in stored.draft.rows)
    schemes = dict.fromkeys(str(scheme) for scheme in declared if scheme is not None)
    return GraftedLayer(
        declared=raw.value if raw is not None and quantized else None,
        names=names,
        quantized=quantized,
        kept=tuple(row.module for row in rows if not stored.is_quantized(row)),
        scheme="; ".join(schemes) if quantized else None,
        format=stored.scheme if quantized else None,
    )


_EMBEDDING, _HEAD = _TABLES = ("embed_tokens.weight", "lm_head.weight")
"""Ends of names of tables that a layer's folder may have, and that belong to the target."""
_WEIGHT = "weight"


def layer_prefixes(stored: StoredDraft, source: DraftSource) -> tuple[str, ...]:
    """The prefixes of the MTP layers of a folder."""
    names = stored.checkpoint.tensors
    if source.subtree is not None:
        return tuple(sorted(source.subtree.split(",")))
    prefixes = mtp_layers(names)
    if not prefixes:
        where = source.folder
        raise CheckpointError(
            where,
            f"no MTP layer stands here: it is a draft of family {stored.draft.family.name}",
            fix="give the folder that `draftquant quantize TARGET --subtree ...` wrote",
        )
    others = [n for n in _outside(names, prefixes) if not n.endswith(_TABLES)]
    if others:
        raise CheckpointError(
            source.folder,
            f"it holds more than an MTP layer: {others[0]}",
            fix=f"name what goes in: --subtree {','.join(prefixes)}",
        )
    return prefixes


def _outside(names: Iterable[str], prefixes: Collection[str]) -> list[str]:
    starts = tuple(f"{prefix}." for prefix in prefixes)
    return [name for name in names if not name.startswith(starts)]


def check_free(
    target: Checkpoint, names: Collection[str], prefixes: Collection[str], *, replace: bool
) -> frozenset[str]:
    """The target's tensors that the layer replaces; refused unless they may go."""
    there = frozenset(names) - frozenset(_outside(names, prefixes))
    if there and not replace:
        raise CheckpointError(
            target.folder,
            f"the target has this layer already: {len(there)} tensors below {', '.join(prefixes)},"
            f" such as {min(there)}",
            fix="add --replace to put the other one in its place, in a new folder: the target"
            " itself stays as it is",
        )
    return there


def check_tables(
    target: Checkpoint, stored: StoredDraft, prefixes: Collection[str]
) -> frozenset[str]:
    """The layer's own copies of embedding and head, which the target has.

    A head that the target lacks is compared with the target's embedding, to which it is tied.
    """
    layer = stored.checkpoint
    left_out = frozenset(_outside(layer.tensors, prefixes))
    for name in sorted(left_out):
        mine, whole = layer.tensors[name], _of_target(target, name)
        if whole is None:
            raise CheckpointError(
                layer.folder,
                f"{name} would be left out, and the target {target.folder} has no such table",
                fix="graft the layer into the target that it was taken from",
            )
        if mine.dtype != whole.dtype and mine.shape == whole.shape:
            continue  # the target's is quantized, and the layer's was not
        if whole.name.rpartition(".")[2] != _WEIGHT:
            continue  # as above, and packed
        if mine.shape != whole.shape or tensor_digest(layer, mine) != tensor_digest(target, whole):
            raise CheckpointError(
                layer.folder,
                f"{name} is not the target's: {_said(mine)} here, {_said(whole)} there"
                f" ({whole.name}), or other values",
                fix="graft the layer into the target that it was taken from; where the target was"
                " trained on, take the layer from the same version",
            )
    return left_out


def _of_target(target: Checkpoint, name: str) -> TensorInfo | None:
    """The target's table of this name, under any root of its text model; quantized, or tied."""
    if name in target.tensors:
        return target.tensors[name]
    table = next(end for end in _TABLES if name.endswith(end))
    for end in (table, _EMBEDDING):
        module = end.rpartition(".")[0]
        tables = [
            tensor
            for other, tensor in sorted(target.tensors.items())
            if f".{module}." in f".{other}" and ".layers." not in other
        ]
        plain = [tensor for tensor in tables if tensor.name.endswith(end)]
        if tables:
            return (plain or tables)[0]
    return None


def _said(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def check_fits(target: Checkpoint, config: Mapping[str, Any], stored: StoredDraft) -> None:
    """By the target's config.json, with the layer counted, the layer is what its own says."""
    draft = stored.draft
    inside = dataclasses.replace(draft.checkpoint, config=config, folder=target.folder)
    family, geometry = read_config(inside)
    if family.name != draft.family.name:
        where = target.folder / CONFIG_FILE
        raise CheckpointError(
            where,
            f"is the config.json of a target whose MTP layer is {family.name}; the layer is"
            f" {draft.family.name}",
            fix="graft the layer into the target that it was taken from",
        )
    for name, there in _sizes(geometry).items():
        here = _sizes(draft.geometry).get(name)
        if there != here and name not in _FOLLOWING:
            where = stored.checkpoint.folder / CONFIG_FILE
            raise CheckpointError(
                where,
                f"{name}: the layer has {here}, the target {target.folder} {there}",
                fix="this is the layer of another target: graft it into the one that it was taken"
                " from",
            )


_FOLLOWING = ("num_layers", "aux_layer_ids")
"""Fields that follow from others, which errors describe better."""


def _sizes(geometry: Any) -> dict[str, Any]:
    sizes = {each.name: getattr(geometry, each.name) for each in dataclasses.fields(geometry)}
    attention = sizes.pop("attention")
    return sizes | dataclasses.asdict(attention)


def check_numbers(target: Checkpoint, stored: StoredDraft, prefixes: Collection[str]) -> None:
    """Layers that are numbered after the target's follow its last one."""
    layer = stored.draft.family.layer
    if layer is None or not layer.groups:
        return
    numbers = sorted(int(match[1]) for p in prefixes if (match := layer.match(f"{p}.")))
    layers = with_text_config(target.config).get("num_hidden_layers")
    inside = with_text_config(stored.checkpoint.config).get("num_hidden_layers")
    if layers == inside and all(type(layers) is int and number >= layers for number in numbers):
        return
    raise CheckpointError(
        stored.checkpoint.folder,
        f"the layer is number {', '.join(map(str, numbers))} after {inside} decoder layers; the"
        f" target has {layers}, after which engines look for layer {layers}",
        fix="graft the layer into the target that it was taken from",
    )
