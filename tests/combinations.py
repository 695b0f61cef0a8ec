"""All combinations of what a recipe can say, and what comes of each."""

import itertools
import typing
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from draftquant.quantize.algorithms import get_algorithm, row_algorithm
from draftquant.quantize.drafts import Row
from draftquant.quantize.files.safetensors_header import TensorInfo
from draftquant.quantize.layouts import check_head, check_layout, get_layout, named_heads
from draftquant.quantize.layouts.layout import rows_of_block
from draftquant.recipes import Algorithm, Recipe, Rule, WeightFormat, load_recipe
from draftquant.recipes.errors import DraftQuantError
from draftquant.recipes.formats import (
    FEW_BITS,
    NUMBER_FORMATS,
    Granularity,
    KvCacheFormat,
    NumberFormat,
    ServedForm,
)
from draftquant.recipes.schema import ALGORITHMS, ActivationFormat, BackendName, Format, LayoutName
from draftquant.recipes.schemes import (
    ABSENT_FORMATS,
    DIFFERENT,
    FIRST_RECIPES,
    LIKE,
    SAME,
    named_algorithm,
    refusal,
)

PTPC = load_recipe("fp8-ptpc")
FP8, NO, YES = "fp8_e4m3", (None,), (True, False)
WEIGHTS = [
    WeightFormat(
        dtype=dtype, granularity=granularity, symmetric=symmetric, group_size=size,
        scale_dtype=scales, first_stage=first, carrier=carrier,
    )
    for dtype, granularity, size, scales, first, carrier, symmetric in itertools.product(
        NUMBER_FORMATS, typing.get_args(Granularity), (None, 16, 32, 64, 128, 256),
        (None, "float16"), (None, FP8), (None, FP8), YES,
    )
]  # fmt: skip
INPUTS = [
    ActivationFormat(dtype=dtype, granularity=granularity, dynamic=dynamic)
    for dtype, granularity, dynamic in itertools.product(
        (FP8, "nvfp4", "mxfp4"), ("token", "tensor", "group"), YES
    )
]
ROUNDINGS = ("nearest", "gptq", "learned")
CHOICES = [
    Algorithm(scale=scale, rounding=rounding, input_correction=correction, norms=norms)
    for scale, rounding, correction, norms in itertools.product(
        ("absmax", "mse"), ROUNDINGS, ("off", "auto"), ("kept", "learned")
    )
]
KEPT_WHY = Format(weights=PTPC.weights, activations=None)
RULES = [
    Rule(role=role, tensor=tensor, action=action, format=form, why=why)
    for role, tensor, action, form, why in itertools.product(
        ((), ("head",), ("embedding", "head"), ("head", "norm", "mlp")), ((), ("a.*",)),
        ("quantize", "keep", "drop"), (None, KEPT_WHY), (None, "so"),
    )
]  # fmt: skip
FACTS = ("only_groups", "is_integer", "is_fp8", "powers_of_two", "is_fp4")


def _said(records: Iterable[Any], say: Callable[[Any], str] = str) -> dict[str, Any]:
    """Problem -> the records that have it, or how many there are."""
    found: dict[str, list[str]] = {}
    for record in records:
        problem = (record.problem() or "none").partition(", not ")[0]
        found.setdefault(problem, []).append(say(record))
    few = (problem for problem, said in found.items() if len(said) < 9 or problem == "none")
    return {problem: len(said) for problem, said in found.items()} | {p: found[p] for p in few}


def _weights(weights: WeightFormat) -> str:
    return f"{weights}{' in F16' if weights.scale_dtype else ''}"


def _algorithm(chosen: Algorithm) -> str:
    return f"{chosen}, norms {chosen.norms}"


def _number(number: NumberFormat) -> dict[str, Any]:
    return {**asdict(number), "true": [name for name in FACTS if getattr(number, name)]}


def _sound(records: Iterable[Any]) -> list[Any]:
    return [record for record in records if record.problem() is None]


def _attempt(do: Callable[[], object]) -> str:
    try:
        return str(do())
    except DraftQuantError as exc:
        return f"{exc.where}: {exc.what} -> {exc.fix}"


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in pairs:
        found.setdefault(value, []).append(key)
    return found


def _layouts() -> dict[str, Any]:
    """What each layout says of each pair of formats, and what it stores for it."""
    tensor = TensorInfo(name="a.weight", dtype="BF16", shape=(96, 384), file="", start=0, stop=0)
    refused, stored = [], {}
    pairs = list(itertools.product(_sound(WEIGHTS), [None, *_sound(INPUTS)]))
    for layout, (weights, inputs) in itertools.product(typing.get_args(LayoutName), pairs):
        recipe = replace(PTPC, layout=layout, weights=weights, activations=inputs)
        said = _attempt(lambda recipe=recipe: check_layout(recipe))
        form = f"{layout}: {_weights(weights)} with {inputs}"
        if said != "None":
            refused.append((form, said.partition(": weights ")[0] + said[said.rfind(" -> ") :]))
        elif weights.carrier is None:
            parts = get_layout(layout).parts(tensor, recipe)
            stored[form] = {suffix: [dtype, *shape] for suffix, (dtype, shape) in parts.items()}
    plugin = [
        f"{layout}: {_weights(weights)} with {inputs}"
        for layout, (weights, inputs) in itertools.product(typing.get_args(LayoutName), pairs)
        if replace(PTPC, layout=layout, weights=weights, activations=inputs).is_for_the_plugin
    ]
    return {"refused": _grouped(refused), "stored": stored, "for the plugin": plugin}


KEPT = (
    "fc", "model.lm_head", "layers.0.embed_proj.1", "confidence_head.proj", "layers.1.ffn.gate",
    "model.mlp.gate", "lilicorr.mlp.up_proj", "a.xpress_head.b.c", "fc",
)  # fmt: skip


def _of_layouts() -> dict[str, Any]:
    """What else each layout says: of caches, heads, names and algorithms."""
    found: dict[str, Any] = {}
    sound = _sound(WEIGHTS)
    cache = KvCacheFormat(dtype=FP8, scales="unit")
    tensor = TensorInfo(name="lm_head.weight", dtype="BF16", shape=(8, 8), file="", start=0, stop=0)
    rows = [Row(tensor=tensor, canonical=f"{role}.weight", role=role) for role in ("head", "norm")]
    blocks = next(weights for weights in sound if weights.granularity == "block")
    for name in typing.get_args(LayoutName):
        layout = get_layout(name)
        every = (
            replace(PTPC, layout=name, weights=weights, activations=inputs)
            for weights, inputs in itertools.product(sound, [None, *_sound(INPUTS)])
        )
        recipe = next(one for one in every if layout.problem(one) is None)
        found[name] = {
            "cache": _attempt(lambda r=recipe: check_layout(replace(r, kv_cache=cache))),
            "cache scales": [*layout.cache_scale_names("a.self_attn"), layout.cache_scale_shape],
            "excludes": layout.excludes(KEPT),
            "heads": [
                _attempt(lambda r=recipe, x=row, w=w: check_head(replace(r, weights=w), x))
                for row, w in itertools.product(rows, (PTPC.weights, blocks))
            ],
            "named": [own.leaves for own in named_heads(recipe, rows)],
            "mixed": _attempt(lambda n=name: check_layout(replace(_mixed(), layout=n))),
            "exact, one dtype": [layout.exact_excludes, layout.int4_scale_dtype],
        }
    found["algorithms"] = _grouped(
        (f"{_algorithm(chosen)}: {_weights(w)}", str(get_algorithm(chosen).problem(w)))
        for chosen, w in itertools.product(_sound(CHOICES)[::2], sound)
    )
    found["by rows"] = _grouped(
        (str(chosen), _attempt(lambda c=chosen: type(row_algorithm(c)).__name__))
        for chosen in _sound(CHOICES)
    )
    return found


def _mixed() -> Recipe:
    first, *others = PTPC.rules
    head = Rule(role=("head",), action="quantize", format=_coarse())
    rest = (rule for rule in others if "head" not in rule.role)
    return replace(PTPC, algorithm=CHOICES[-1], rules=(first, head, *rest))


def _coarse() -> Format:
    return Format(
        weights=next(w for w in _sound(WEIGHTS) if w.dtype == "nvfp4"),
        activations=next(a for a in _sound(INPUTS) if a.dtype == "nvfp4"),
    )


def _recipes() -> dict[str, Any]:
    """Whole recipes that contradict themselves, and one of several formats."""
    own, (first, *others) = Format(weights=PTPC.weights, activations=PTPC.activations), PTPC.rules
    mixed, coarse = _mixed(), _coarse()
    variants: dict[str, Recipe] = {
        "none": PTPC,
        "mixed": mixed,
        "nothing quantized": replace(PTPC, rules=tuple(others)),
        "twice": replace(PTPC, rules=(first, *PTPC.rules)),
        "own format": replace(PTPC, rules=(replace(first, format=own), *others)),
        "no rule without": replace(PTPC, rules=(replace(first, format=coarse), *others)),
    }
    return {name: str(recipe.problem()) for name, recipe in variants.items()} | {
        "formats": [
            [str(form), str(own.weights), _algorithm(own.algorithm),
             form.needs_input_scale, form.has_coarse_inputs]
            for form in mixed.formats
            for own in [mixed.in_format(form)]
        ],
        "of rules": [str(mixed.of(rule).weights) for rule in mixed.rules],
        "scales of inputs": [mixed.needs_input_scales, PTPC.needs_input_scales],
        "brief": dict(PTPC.brief()),
        "rules": [str(rule) for rule in (mixed.rules[1], first, RULES[1])],
    }  # fmt: skip


def combinations() -> dict[str, Any]:
    """Everything, as JSON has it."""
    sound = _sound(WEIGHTS)
    caches = [KvCacheFormat(dtype=FP8, scales=s) for s in ("unit", "absmax", "measured")]
    backends = typing.get_args(BackendName)
    return {
        "names of recipes": [
            dict(FIRST_RECIPES),
            dict(LIKE),
            dict(SAME),
            [*DIFFERENT],
            [*ABSENT_FORMATS],
        ],
        "few bits": [*FEW_BITS, *FEW_BITS],
        "numbers": {name: _number(number) for name, number in NUMBER_FORMATS.items()},
        "weights": _said(WEIGHTS, _weights),
        "whole matrix": [str(weights) for weights in sound if weights.scales_whole_matrix],
        "stored otherwise": {str(w): str(w.stored) for w in sound if w.stored != w},
        "inputs": _said(INPUTS),
        "algorithms": _said(CHOICES, _algorithm),
        "names": [chosen.name for chosen in CHOICES[::4]],
        "of weights": _grouped(
            (f"{_algorithm(chosen)}: {_weights(weights)}", _algorithm(chosen.of(weights)))
            for chosen, weights in itertools.product(_sound(CHOICES), sound)
            if chosen.of(weights) != chosen
        ),
        "rounded": {
            f"{_algorithm(chosen)} to {rounding}": _algorithm(chosen.rounded(rounding))  # type: ignore[arg-type]
            for chosen, rounding in itertools.product(_sound(CHOICES), ROUNDINGS)
        },
        "to nearest": _grouped((_algorithm(c), _algorithm(c.to_nearest)) for c in _sound(CHOICES)),
        "rules": _said(RULES, lambda rule: f"{rule} {rule.format is not None} {rule.why}"),
        "recipes": _recipes(),
        "caches": {str(cache): cache.needs_traces for cache in caches},
        "served": [
            [(form := ServedForm(online_head=head, kv_cache=cache)).label("d"), form.changes]
            for head, cache in itertools.product((None, "fp8", "nvfp4"), (None, FP8))
        ],
        "backends": _grouped(
            (f"{backend}: {chosen}", str(refusal(backend, chosen)))
            for backend, chosen in itertools.product(backends, _sound(CHOICES))
        ),
        "named": {
            f"{backend}: {name}": _attempt(lambda b=backend, n=name: named_algorithm(n, b))
            for backend, name in itertools.product(backends, (*ALGORITHMS, "awq", "absmx"))
        },
        "rows of a block": {_weights(w): rows_of_block(w) for w in sound},
        "layouts": _layouts(),
        "of layouts": _of_layouts(),
    }
