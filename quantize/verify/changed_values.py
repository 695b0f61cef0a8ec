"""Norms that balancing divided or that learned, and what draftquant.json may say of them.

A balanced norm is the source's / 2^k, exactly. One that learned lies near that, and as far from it
as it is recorded; what exactly it is the digests under the seal say.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ...recipes.errors import CheckpointError
from ..drafts import Draft, read_config
from ..drafts.family import MOST_OF_NORM, norms_before
from ..files.checkpoint import CONFIG_FILE, PROVENANCE_FILE, Checkpoint
from ..files.digests import NEWEST, Algorithm, Digest, Finiteness
from ..files.provenance import Method
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import floats, read_whole, stored_scalar
from ..stored.layouts import DeclaredScheme
from ..stored.stored_cache import cache_problems, cache_tensors
from .verify_report import Compared, Fault, NotFinite, OnBytes

Doubles = npt.NDArray[np.float64]
_LARGEST_EXPONENT = 126  # 2^k and 2^-k are normal float32 numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedNorms:
    """What a run changed beside the linears.

    Attributes:
        exponents: tensor name -> k, of the norm that was divided by 2^k, and of the linears whose
            first half of columns was multiplied by it.
        factors: weight of a norm that learned -> the largest factor by which an element changed.
        faults: of what is recorded; nothing is taken for changed where it makes no sense.
    """

    exponents: Mapping[str, int] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, method: Method, draft: Draft, quantized: Collection[str]) -> "ChangedNorms":
        """What is recorded.

        Args:
            method: of the run, or as recorded.
        """
        exponents, unbalanced = _balance_exponents(method, draft, quantized)
        factors, unlearned = _learned_factors(method, draft, quantized)
        return cls(exponents=exponents, factors=factors, faults=(*unbalanced, *unlearned))

    def changes(self, norm: TensorInfo) -> bool:
        """Whether a kept tensor may differ from the source's."""
        return norm.name in self.exponents or norm.name in self.factors

    def compare(
        self,
        source: Checkpoint,
        output: Checkpoint,
        norm: TensorInfo,
        on_bytes: OnBytes,
        algorithm: Algorithm = NEWEST,
    ) -> Compared:
        """The weight of a norm: every element exactly, its sign too, or within its factor.

        Float64 holds every quotient exactly, also of what is subnormal in float32.
        """
        a, b = read_whole(source, norm), read_whole(output, output.tensors[norm.name])
        on_bytes(a.size + b.size)
        before, after = (floats(block, norm.dtype).astype(np.float64) for block in (a, b))
        digests = Digest(algorithm), Digest(algorithm)
        finiteness = Finiteness(norm.dtype, norm.shape)
        finiteness.look(a)
        for digest, block in zip(digests, (a, b), strict=True):
            digest.update(block.data)
        factor, exponent = self.factors.get(norm.name), self.exponents.get(norm.name, 0)
        wanted = before * 2.0**-exponent
        if factor is not None:
            fault = _factor_fault(norm.name, wanted, after, factor)
        else:
            fault = _balance_fault(norm.name, before, wanted, after, exponent)
        return Compared(
            source_digests={norm.name: str(digests[0])},
            output_digests={norm.name: str(digests[1])},
            faults=NotFinite.of(norm.name, finiteness.problem) or ([fault] if fault else []),
        )


def _balance_fault(
    name: str, before: Doubles, wanted: Doubles, after: Doubles, exponent: int
) -> Fault | None:
    wrong = np.flatnonzero(wanted.view(np.uint64) != after.view(np.uint64))
    if not len(wrong):
        return None
    got = _others(wrong, before, after)
    return Fault(where=name, expected=f"the source's values / 2^{exponent}", got=got)


def _factor_fault(name: str, before: Doubles, after: Doubles, factor: float) -> Fault | None:
    """Every element keeps its sign and changes by the factor at most, and one by just that."""
    with np.errstate(divide="ignore", invalid="ignore"):
        larger = np.maximum(np.abs(before), np.abs(after))
        factors = np.where(larger > 0, larger / np.minimum(np.abs(before), np.abs(after)), 1.0)
    right = (factors <= factor) & (np.signbit(before) == np.signbit(after))
    wrong = np.flatnonzero(~right)
    if len(wrong):
        expected = f"the source's values times or divided by at most {factor:.9g} (recorded)"
        return Fault(where=name, expected=expected, got=_others(wrong, before, after))
    largest = float(factors.max(initial=1.0))
    if largest != factor:
        expected = f"a largest change by a factor of {factor:.9g} (recorded)"
        return Fault(where=name, expected=expected, got=f"{largest:.9g}")
    return None


def _others(wrong: npt.NDArray[np.intp], before: Doubles, after: Doubles) -> str:
    """How many elements are wrong, and the first of them."""
    first = int(wrong[0])
    return f"{len(wrong)} other(s), first {after[first]:g} for {before[first]:g} at {first}"


def _learned_factors(
    method: Method, draft: Draft, quantized: Collection[str]
) -> tuple[dict[str, float], list[Fault]]:
    where, expected = f"{PROVENANCE_FILE}: learned_norms", "none: the recipe keeps them"
    found, wanted = dict(method.learned_norms), set[str]()
    if method.recipe.algorithm.norms == "learned":
        wanted = {row.tensor.name for row in norms_before(draft, quantized)}
        expected = ", ".join(sorted(wanted)) or "none: no quantized linear has a norm of its own"
    if found.keys() != wanted:
        got = ", ".join(sorted(found)) or "none"
        return {}, [Fault(where=where, expected=expected, got=got)]
    if not all(1 <= factor <= MOST_OF_NORM for factor in found.values()):
        expected = f"factors from 1 to {MOST_OF_NORM:g}"
        return {}, [Fault(where=where, expected=expected, got=str(found))]
    return found, []


def _balance_exponents(
    method: Method, draft: Draft, quantized: Collection[str]
) -> tuple[dict[str, int], list[Fault]]:
    """What balancing the concat input changed: tensor name -> k, of the norm and the linears.

    The norm was divided by 2^k, the first half of the columns of each linear that reads it was
    multiplied. Nothing is taken for balanced unless all that is recorded makes sense.

    Args:
        method: of the run, or as recorded.
    """
    if not method.balanced:
        return {}, []
    where, got = f"{PROVENANCE_FILE}: balanced", str(dict(method.balanced))
    concat = draft.family.concat(draft.geometry)
    norm = draft.row(concat.norm) if concat is not None else None
    linears = draft.concat_linears()
    kept = [row.module for row in linears if row.module not in quantized]
    if method.recipe.algorithm.balance_concat == "off":
        expected = "none: the recipe says balance_concat: off"
    elif norm is None or not linears:
        expected = f"none: drafts of {draft.family.name} have no concat input"
    elif set(method.balanced) != {norm.tensor.name}:
        expected = f"{norm.tensor.name} alone"
    elif not 0 < abs(exponent := method.balanced[norm.tensor.name]) <= _LARGEST_EXPONENT:
        expected = f"a power of two between 1 and {_LARGEST_EXPONENT}, or the negative of one"
    elif kept:
        expected = f"none: {', '.join(kept)} read it and are kept"
    else:
        return dict.fromkeys((norm.tensor.name, *(r.tensor.name for r in linears)), exponent), []
    return {}, [Fault(where=where, expected=expected, got=got)]


# ---- The scales of a KV cache: declared and stored together, one for each layer, and those of the
# run
#
# A scale is a number that nothing else in the folder depends on: one that is missing is served as
# 1.

_ATTENTION = re.compile(r"(?P<stored>.*self_attn)\.(?:k_proj|kv_a_proj_with_mqa)")
_LAYER = re.compile(r"layers\.(\d+)\.self_attn\.")


def cache_scale_names(draft: Draft, output: Checkpoint) -> Collection[str]:
    """Names of the stored scales of this draft's layers, in any spelling."""
    layers = _layers(draft)
    found = cache_tensors(output, draft.family)
    return [tensor.name for layer, _, tensor in found if layer in layers]


def cache_scale_faults(
    draft: Draft, output: Checkpoint, scheme: DeclaredScheme | None, method: Method | None
) -> list[Fault]:
    """Every layer has its scales, they are positive numbers, and they are those of the run.

    Args:
        method: of the run; None where another tool made the folder, which may leave scales to
            engines, or store them in several spellings and dtypes.
    """
    faults = [
        Fault(where=where, expected=expected, got=got)
        for where, expected, got in cache_problems(output, draft, scheme)
    ]
    declared = scheme.kv_cache if scheme is not None else None
    stored = {
        (layer, part): tensor
        for layer, of, tensor in cache_tensors(output, draft.family)
        for part in of
    }
    if declared is None and stored and (method is not None or scheme is None):
        names = ", ".join(sorted({tensor.name for tensor in stored.values()}))
        where = f"{CONFIG_FILE}: quantization_config"
        faults.append(Fault(where=where, expected=f"a KV cache, for {names}", got="none"))
    layers = _layers(draft)
    wanted = [(layer, part) for layer in sorted(layers) for part in "kv"] if declared else []
    if method is None and not stored:
        wanted = []  # of another tool: engines take 1
    for layer, part in wanted:
        if (layer, part) not in stored:
            where = f"{layers[layer]}: {part}_scale"
            faults.append(Fault(where=where, expected="a scale of the KV cache", got="none"))
    if method is None or faults:
        return faults
    return _of_the_run(layers, stored, output, method)


def _of_the_run(
    layers: Mapping[int, str],
    stored: Mapping[tuple[int, str], TensorInfo],
    output: Checkpoint,
    method: Method,
) -> list[Fault]:
    """Bit for bit, in float32, and 1 where the recipe says so."""
    cache, faults = method.recipe.kv_cache, []
    where = f"{PROVENANCE_FILE}: cache_scales"
    given = dict(method.cache_scales)
    for layer, name in layers.items() if cache is not None else ():
        for part in "kv":
            tensor = stored[layer, part]
            recorded = given.pop(f"{name}.{part}", None)
            if recorded is None:
                faults.append(Fault(where=where, expected=f"one of {name}.{part}", got="none"))
                continue
            wanted = float(np.float32(recorded))
            if cache is not None and cache.scales == "unit":
                wanted = 1.0
            if (tensor.dtype, tensor.numel) != ("F32", 1):
                got = f"{tensor.dtype} {list(tensor.shape)}"
                faults.append(Fault(where=tensor.name, expected="one F32 number", got=got))
            elif (found := stored_scalar(output, tensor)) != wanted:
                expected = f"{wanted:.9g} (that of the run)"
                faults.append(Fault(where=tensor.name, expected=expected, got=f"{found:.9g}"))
    if given:
        faults.append(Fault(where=where, expected="none (recipe)", got=", ".join(sorted(given))))
    return faults


def _layers(draft: Draft) -> dict[int, str]:
    """Number of each layer with attention -> on-disk name of that."""
    found = {}
    for row in draft.rows:
        stored, layer = _ATTENTION.fullmatch(row.module), _LAYER.match(row.canonical)
        if stored is not None and layer is not None:
            found[int(layer[1])] = stored["stored"]
    return found


# ---- What config.json of an output may say: what the source's does, and what its run says of
# changes
#
# They are put in by a few lines that nothing else uses, and none may change what the draft
# computes:
# a fix is for what engines read.

_DECLARATION = "quantization_config"
Config = Mapping[str, object]


def config_faults(draft: Draft, output: Checkpoint, changes: Config | None) -> list[Fault]:
    """Every key but the declaration has the value that it should have.

    Args:
        changes: dotted key -> value, as the run says; None where nothing says, since another tool
            made the folder: what changes nothing that the draft computes may be written there.
    """
    source = draft.checkpoint.config
    if changes is not None:
        return _different(_changed(source, changes), output.config) + _altered(draft, changes)
    keys = source.keys() | output.config.keys()
    other = [key for key in keys if _said(source, key) != _said(output.config, key)]
    altering = {fault.where for fault in _altered(draft, {k: output.config.get(k) for k in other})}
    found = _different(source, output.config)
    return [fault for fault in found if fault.where in altering]


def _changed(config: Config, changes: Config) -> dict[str, object]:
    """The config with each dotted key at its value; what is in the way of a section gives way."""
    changed = dict(config)
    for path, value in changes.items():
        section, _, rest = path.partition(".")
        inner = changed.get(section)
        changed[section] = (
            _changed(inner if isinstance(inner, Mapping) else {}, {rest: value}) if rest else value
        )
    return changed


def _different(wanted: Config, found: Config) -> list[Fault]:
    return [
        Fault(where=_place(key), expected=_said(wanted, key), got=_said(found, key))
        for key in sorted((wanted.keys() | found.keys()) - {_DECLARATION})
        if _said(wanted, key) != _said(found, key)
    ]


def _altered(draft: Draft, changes: Config) -> list[Fault]:
    """The changes that make another draft of the source, if all of them together do."""
    before = _computed(draft, {})
    if _computed(draft, changes) == before:
        return []
    alone = {
        key: value for key, value in changes.items() if _computed(draft, {key: value}) != before
    }
    return [
        Fault(
            where=_place(key),
            expected="no change of what the draft computes",
            got=json.dumps(value, sort_keys=True),
        )
        for key, value in (alone or changes).items()
    ]


def _computed(draft: Draft, changes: Config) -> tuple[str, object] | None:
    """Which family and numbers config.json stands for; None where it stands for none."""
    config = {
        k: v for k, v in _changed(draft.checkpoint.config, changes).items() if k != _DECLARATION
    }
    try:
        family, geometry = read_config(replace(draft.checkpoint, config=config))
    except CheckpointError:
        return None
    return family.name, geometry


def _place(key: str) -> str:
    return f"{CONFIG_FILE}: {key}"


def _said(config: Config, key: str) -> str:
    """A value as text that tells 1 from true and 1.0; "no such key" is not valid JSON."""
    return json.dumps(config[key], sort_keys=True) if key in config else "no such key"
