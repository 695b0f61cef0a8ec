"""What a run changed besides codes, and what it recorded of that: norms, cache scales, config.

A balanced norm is exactly the source's / 2^k; a learned norm lies within its recorded factor.
config.json may change only in keys that leave what the draft computes as it is.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ...recipes.errors import CheckpointError
from ..drafts import Draft, read_config
from ..drafts.family import MOST_OF_NORM, norms_before
from ..files.checkpoint import CONFIG_FILE, PROVENANCE_FILE, Checkpoint
from ..files.digests import Digest
from ..files.finiteness import Finiteness
from ..files.provenance import Method
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import floats, read_whole
from ..stored.layouts.scheme import DeclaredScheme
from ..stored.stored_draft import cache_problems, cache_tensors
from .comparison import Compared, Fault, NotFinite, Sides, differing, form, others
from .demands import other_scalar, said_of

Config = Mapping[str, object]
Doubles = npt.NDArray[np.float64]
_LARGEST_EXPONENT = 126  # 2^k and 2^-k are normal float32 numbers
_DECLARATION = "quantization_config"
_ATTENTION = re.compile(r"(?P<stored>.*self_attn)\.(?:k_proj|kv_a_proj_with_mqa)")
_LAYER = re.compile(r"layers\.(\d+)\.self_attn\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedNorms:
    """What a run changed besides the linears.

    Attributes:
        exponents: tensor name -> k, for the norm that was divided by 2^k, and for the linears whose
            first half of columns was multiplied by it.
        factors: weight of a norm that learned -> the largest factor by which an element changed.
        faults: in the record; where the record makes no sense, nothing counts as changed.
    """

    exponents: Mapping[str, int] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, method: Method, draft: Draft, quantized: Collection[str]) -> "ChangedNorms":
        """What is recorded; `quantized` are the modules that are stored quantized."""
        exponents, unbalanced = _balance_exponents(method, draft, quantized)
        factors, unlearned = _learned_factors(method, draft, quantized)
        return cls(exponents=exponents, factors=factors, faults=(*unbalanced, *unlearned))

    def changes(self, norm: TensorInfo) -> bool:
        """Whether a kept tensor may differ from the source's."""
        return norm.name in self.exponents or norm.name in self.factors

    def compare(self, sides: Sides, norm: TensorInfo) -> Compared:
        """Compare the weight of a norm: each element exactly, with its sign, or within its factor.

        Float64 holds every quotient exactly, even one that is subnormal in float32.
        """
        a = read_whole(sides.source, norm)
        b = read_whole(sides.output, sides.output.tensors[norm.name])
        sides.on_bytes(a.size + b.size)
        before, after = (floats(block, norm.dtype).astype(np.float64) for block in (a, b))
        digests = Digest(), Digest()
        finiteness = Finiteness(norm.dtype, norm.shape)
        finiteness.look(a)
        for digest, block in zip(digests, (a, b), strict=True):
            digest.update(block.data)
        factor, exponent = self.factors.get(norm.name), self.exponents.get(norm.name, 0)
        wanted = before * 2.0**-exponent
        if factor is not None:
            faults = _factor_faults(norm.name, wanted, after, factor)
        else:
            wrong = wanted.view(np.uint64) != after.view(np.uint64)
            expected = f"the source's values / 2^{exponent}"
            faults = _other_elements(norm.name, expected, wrong, before, after)
        return Compared(
            source_digests={norm.name: str(digests[0])},
            output_digests={norm.name: str(digests[1])},
            faults=NotFinite.of(norm.name, finiteness.problem) or faults,
        )


def _factor_faults(name: str, before: Doubles, after: Doubles, factor: float) -> list[Fault]:
    """Every element keeps its sign and changes at most by the factor, and one by just that."""
    with np.errstate(divide="ignore", invalid="ignore"):
        larger = np.maximum(np.abs(before), np.abs(after))
        factors = np.where(larger > 0, larger / np.minimum(np.abs(before), np.abs(after)), 1.0)
    right = (factors <= factor) & (np.signbit(before) == np.signbit(after))
    expected = f"the source's values times or divided by at most {factor:.9g} (recorded)"
    faults = _other_elements(name, expected, ~right, before, after)
    largest = factors.max()
    if faults or largest == factor:
        return faults
    expected = f"a largest change by a factor of {factor:.9g} (recorded)"
    return [Fault(name, expected, f"{largest:.9g}")]


def _other_elements(
    name: str, expected: str, wrong: npt.NDArray[np.bool_], before: Doubles, after: Doubles
) -> list[Fault]:
    say = "first {:g} for {:g} at {}".format
    return others(name, expected, wrong, lambda at: say(after[at], before[at], at[0]))


def _learned_factors(
    method: Method, draft: Draft, quantized: Collection[str]
) -> tuple[dict[str, float], list[Fault]]:
    where, expected = f"{PROVENANCE_FILE}: learned_norms", "none: the recipe keeps them"
    factors, wanted = dict(method.learned_norms), set[str]()
    if method.recipe.algorithm.norms == "learned":
        wanted = {row.tensor.name for row in norms_before(draft, quantized)}
        expected = ", ".join(sorted(wanted)) or "none: no quantized linear has a norm of its own"
    if factors.keys() != wanted:
        return {}, [Fault(where, expected, ", ".join(sorted(factors)) or "none")]
    if not all(1 <= factor <= MOST_OF_NORM for factor in factors.values()):
        expected = f"factors from 1 to {MOST_OF_NORM:g}"
        return {}, [Fault(where, expected, str(factors))]
    return factors, []


def _balance_exponents(
    method: Method, draft: Draft, quantized: Collection[str]
) -> tuple[dict[str, int], list[Fault]]:
    """What balancing the concat input changed: tensor name -> k, for the norm and the linears.

    Nothing counts as balanced unless the whole record makes sense.
    """
    if not method.balanced:
        return {}, []
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
    return {}, [Fault(f"{PROVENANCE_FILE}: balanced", expected, str(dict(method.balanced)))]


def cache_scale_names(draft: Draft, output: Checkpoint) -> Collection[str]:
    """Names of the stored scales of this draft's layers, in any spelling."""
    layers = _layers(draft)
    tensors = cache_tensors(output, draft.family)
    return [tensor.name for layer, _, tensor in tensors if layer in layers]


def cache_scale_faults(
    draft: Draft, output: Checkpoint, scheme: DeclaredScheme | None, method: Method | None
) -> list[Fault]:
    """Every layer has its scales; they are positive and equal those of the run.

    Another tool (no `method`) may leave the scales to engines, or store several spellings.
    """
    faults = [Fault(*problem) for problem in cache_problems(output, draft, scheme)]
    declared = scheme.kv_cache if scheme is not None else None
    tensors = cache_tensors(output, draft.family)
    stored = {(layer, part): tensor for layer, of, tensor in tensors for part in of}
    if declared is None and stored and (method is not None or scheme is None):
        names = ", ".join(sorted({tensor.name for tensor in stored.values()}))
        faults.append(Fault(f"{CONFIG_FILE}: {_DECLARATION}", f"a KV cache, for {names}", "none"))
    layers = _layers(draft)
    by_engines = method is None and not stored  # another tool's folder: engines use 1
    for layer in sorted(layers) if declared and not by_engines else ():
        for part in "kv":
            if (layer, part) not in stored:
                where = f"{layers[layer]}: {part}_scale"
                faults.append(Fault(where, "a scale of the KV cache", "none"))
    if method is None or faults:
        return faults
    return [*_scales_of_the_run(layers, stored, output, method)]


def _scales_of_the_run(
    layers: Mapping[int, str],
    stored: Mapping[tuple[int, str], TensorInfo],
    output: Checkpoint,
    method: Method,
) -> Iterator[Fault]:
    cache, where = method.recipe.kv_cache, f"{PROVENANCE_FILE}: cache_scales"
    given = dict(method.cache_scales)
    for layer, name in layers.items() if cache is not None else ():
        for part in "kv":
            tensor, recorded = stored[layer, part], given.pop(f"{name}.{part}", None)
            if recorded is None:
                yield Fault(where, f"one of {name}.{part}", "none")
            elif (tensor.dtype, tensor.numel) != ("F32", 1):
                yield Fault(tensor.name, "one F32 number", form(tensor))
            else:
                unit = cache is not None and cache.scales == "unit"
                wanted = 1.0 if unit else float(np.float32(recorded))
                yield from other_scalar(output, tensor, wanted)
    if given:
        yield Fault(where, "none (recipe)", ", ".join(sorted(given)))


def _layers(draft: Draft) -> dict[int, str]:
    layers = {}
    for row in draft.rows:
        stored, layer = _ATTENTION.fullmatch(row.module), _LAYER.match(row.canonical)
        if stored is not None and layer is not None:
            layers[int(layer[1])] = stored["stored"]
    return layers


def config_faults(draft: Draft, output: Checkpoint, changes: Config | None) -> list[Fault]:
    """Every key of config.json except the declaration has the value that it should have.

    `changes` maps dotted keys to values, as the run recorded them; None: another tool's folder.
    """
    source = draft.checkpoint.config
    if changes is not None:
        return different_keys(_changed(source, changes), output.config) + _altered(draft, changes)
    faults = different_keys(source, output.config)
    other = [fault.where.removeprefix(f"{CONFIG_FILE}: ") for fault in faults]
    altering = {fault.where for fault in _altered(draft, {k: output.config.get(k) for k in other})}
    return [fault for fault in faults if fault.where in altering]


def different_keys(
    wanted: Config, got: Config, *, but: Collection[str] = (_DECLARATION,)
) -> list[Fault]:
    """The keys of config.json whose values differ, except the ignored ones."""
    keys = sorted((wanted.keys() | got.keys()) - set(but))
    pairs = {key: (said_of(wanted, key), said_of(got, key)) for key in keys}
    return differing(f"{CONFIG_FILE}: ", pairs)


def _changed(config: Config, changes: Config) -> dict[str, object]:
    """The config with each dotted key set; a value in the place of a section is replaced."""
    changed = dict(config)
    for path, value in changes.items():
        section, _, rest = path.partition(".")
        inner = changed.get(section)
        inner = inner if isinstance(inner, Mapping) else {}
        changed[section] = _changed(inner, {rest: value}) if rest else value
    return changed


def _altered(draft: Draft, changes: Config) -> list[Fault]:
    """The changes that turn the source into another draft, if all of them together do."""
    before = _computed(draft, {})
    if _computed(draft, changes) == before:
        return []
    alone = {k: v for k, v in changes.items() if _computed(draft, {k: v}) != before}
    expected = "no change of what the draft computes"
    return [
        Fault(f"{CONFIG_FILE}: {key}", expected, json.dumps(value, sort_keys=True))
        for key, value in (alone or changes).items()
    ]


def _computed(draft: Draft, changes: Config) -> tuple[str, object] | None:
    """The family and numbers that config.json describes; None where it describes none."""
    changed = _changed(draft.checkpoint.config, changes)
    config = {key: value for key, value in changed.items() if key != _DECLARATION}
    try:
        family, geometry = read_config(replace(draft.checkpoint, config=config))
    except CheckpointError:
        return None
    return family.name, geometry
