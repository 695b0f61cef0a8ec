"""What was executed: `check` says LOADS of such drafts and of no other.

`executed_forms.json` is what `experiments/run forms` found: by engine and kind of draft, the facts
of all folders that the engine loaded. A folder has an executed form if each of its facts is among
them.

`executed_classes.json` is what `experiments/run classes` found of drafts that no family reads: a
small folder for each class, plain and quantized. A folder like one of them, in names, flags and
declaration, with shapes that follow from the same keys of config.json, is answered as that one was.
"""

import functools
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from ...recipes.regular_file import read_text
from ...recipes.strict_json import parse_json
from ..drafts.architectures import declared_architecture
from ..drafts.config_reader import KEY, KNOWN, SECTION, object_at, with_text_config
from ..drafts.engine_traits import Finding
from ..drafts.recognition import is_speculators
from ..files.checkpoint import Checkpoint
from ..stored.layouts.scheme import FLOAT_DTYPES
from .built_linears import ROUTED
from .contract import TRY, DraftForm, Layer
from .engine import Engine
from .folder_findings import Folder

Shapes = Mapping[str, Sequence[int]]
_NO_MATTER = {"transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache", "name"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.)\d+$")
_DECLARED = "quantization_config"
_OF_TARGET = (
    "keep it in BF16: beside a BF16 target this class does not read the draft's own declaration;"
    " in a target that is quantized alike (graft) it may"
)


@functools.cache
def _rows() -> Sequence[Mapping[str, Any]]:
    file = Path(__file__).with_name("executed_classes.json")
    rows: Sequence[Mapping[str, Any]] = parse_json(read_text(file))
    return rows


def executed_class(checkpoint: Checkpoint, asked: str) -> Sequence[Finding] | None:
    """The findings of a question "ENGINE ARCH TP"; () = it loads; None where no class was asked."""
    name = declared_architecture(checkpoint.config)
    rows = [row for row in _rows() if declared_architecture(row["config"]) == name]
    rows = [row for row in rows if any(asked in places for places in row["answers"].values())]
    if not rows:
        return None
    other = ""
    for row in rows:
        other = _difference(checkpoint, row)
        if not other:
            verdict = next(v for v, places in row["answers"].items() if asked in places)
            if verdict not in _STAGES:
                return ()
            remedy = _OF_TARGET if _DECLARED in row["config"] else TRY
            return [Finding(_STAGES[verdict], row["error"], remedy)]
    what = f"Its class for {name} was executed with folders that differ in {other}"
    return [Finding("unknown", what, TRY)]


_STAGES: Mapping[str, Any] = {"REFUSED": "load", "LOADS BUT WRONG": "wrong"}


def _difference(checkpoint: Checkpoint, row: Mapping[str, Any]) -> str:
    """The first thing that is otherwise than in an executed folder; "" where nothing is."""
    ours, theirs = (with_text_config(config) for config in (checkpoint.config, row["config"]))
    for key in sorted((ours.keys() | theirs.keys()) - _NO_MATTER - {_DECLARED}):
        mine, other = ours.get(key), theirs.get(key)
        if mine != other and (isinstance(mine, bool | str) or isinstance(other, bool | str)):
            return f"{key} of config.json ({other!r}, not {mine!r})"
    stored = {t.name: [t.dtype, *t.shape] for t in checkpoint.tensors.values()}
    mine, other = (dict(_numbered(*side)) for side in ((stored, ours), (row["tensors"], theirs)))
    if unlike := sorted(mine.keys() ^ other.keys()):
        return unlike[0]
    if _spelled(ours) != _spelled(theirs):
        return _DECLARED
    for name, (dtype, *shape) in mine.items():
        pairs = list(zip(shape, other[name][1:], strict=False))
        alike = dtype == other[name][0] and len(shape) == len(other[name]) - 1
        if not alike or not all(_follows(a, b, ours, theirs) for a, b in pairs):
            return f"{name} {shape}"
    return ""


def _numbered(tensors: Shapes, config: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int]]]:
    """Names with "L" for the number of the target's layers, and "E" for an expert's."""
    experts = {match[1] for name in tensors if (match := re.search(r"experts\.(\d+)\.", name))}
    layers = str(config.get("num_hidden_layers"))
    for name, shape in tensors.items():
        plain = re.sub(r"experts\.\d+\.", "experts.E.", name)
        yield _NUMBER.sub(lambda n: "L" if n[0] == layers else n[0], plain), shape
    if experts:
        yield "experts", ["", len(experts)]  # type: ignore[list-item]


def _spelled(config: Mapping[str, Any]) -> str:
    text = json.dumps(config.get(_DECLARED), sort_keys=True)
    names = re.sub(r"experts\.\d+\.", "experts.E.", text)
    return json.dumps(sorted(set(re.findall(r'"[^"]*"', _NUMBER.sub("N", names)))))


_WIDTH, _MULTIPLES = "hidden_size", (2, 3)
"""Of what a fusion reads."""
_PACKED = (8, 128)
"""Values in an element of a row: eight of four bits, a group under one scale."""


def _follows(mine: int, other: int, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether one expression over keys of config.json gives both dimensions, or none the other."""
    both = [k for k in theirs if type(theirs[k]) is type(ours.get(k)) is int]
    one = [(theirs[k], ours[k]) for k in both]
    wide = [(theirs[_WIDTH] * n, ours[_WIDTH] * n) for n in _MULTIPLES if _WIDTH in both]
    two = [(theirs[a] * theirs[b], ours[a] * ours[b]) for a, b in itertools.combinations(both, 2)]
    packed = [(then / n, now / n) for then, now in (*one, *two, *wide) for n in _PACKED]
    for level in ([*one, *wide], two, packed):  # the simplest that gives it decides
        if told := [now for then, now in level if then == other]:
            return mine in told
    return mine == other


# ---- Forms of drafts that a family reads

_SECTIONS = (SECTION, "dflash_config")
_OF_ROPE = ("rope_parameters", "rope_scaling")
"""Of MTP layers; what engines do with other drafts' is said by the rows of ropes."""
_LISTS = (KEY, "target_layer_ids", "layer_types")
_FLAGS = KNOWN - {"use_cache"}
_FLOATS = "floats"
_VALUES = ("weight", "weight_packed", "qweight")


def form_of(folder: Folder, layers: Sequence[Layer], written: Mapping[str, Any]) -> DraftForm:
    """The form of a folder as an engine builds it; `written`: its config.json as it is stored."""
    question = folder.question
    name = declared_architecture(question.config) or ""
    linears: dict[str, set[str]] = defaultdict(set)
    for layer in layers:
        linears[layer.module.rpartition(".")[2]].add(layer.scheme or _FLOATS)
    stored = folder.checkpoint.tensors.items()
    experts = {t.dtype for n, t in stored if ROUTED in n and n.rpartition(".")[2] in _VALUES}
    if experts:
        stack = "stacked " if folder.checkpoint.stacks_experts else ""
        floats = experts <= set(FLOAT_DTYPES)
        linears[f"{stack}experts"].add(_FLOATS if floats else str(question.signature or ""))
    return DraftForm(
        draft=name if question.traits.is_mtp else folder.family.name,
        layers=question.num_layers,
        linears={module: " and ".join(sorted(taken)) for module, taken in linears.items()},
        others=(
            *_of_config(question.config, fuses=question.fuses, mtp=question.traits.is_mtp),
            "the speculators layout" if is_speculators(written) else "an ordinary config.json",
            "inside its target" if question.inside_target else "a folder of its own",
            *_of_tensors(folder),
        ),
    )


def _of_config(config: Mapping[str, Any], *, fuses: bool, mtp: bool) -> Iterator[str]:
    """Its flags, and where it names layers and rotation; neither sizes nor names of people."""
    yield f"model_type {config.get('model_type')}"
    sections = (*_SECTIONS, *_OF_ROPE) if mtp else _SECTIONS
    whole = {"": config} | {section: object_at(config, section) for section in sections}
    for section, keys in whole.items():
        for key, value in sorted(keys.items()):
            where = f"{section}.{key}" if section else key
            if isinstance(value, bool) and key in _FLAGS:
                yield f"{where} {str(value).lower()}"
            elif key in _LISTS and isinstance(value, list):
                kinds = sorted({each for each in value if isinstance(each, str)})
                yield " ".join([where, *kinds])
            elif section in _OF_ROPE and isinstance(value, Mapping):
                yield f"{section} by layer type"
            elif key in ("rope_type", "type"):
                yield f"{where} {value}"
    if not fuses:
        yield "no fc"


def _of_tensors(folder: Folder) -> Iterator[str]:
    """Norms, tables and dtypes."""
    norms: dict[str, set[str]] = defaultdict(set)
    dtypes = set()
    for name, tensor in folder.checkpoint.tensors.items():
        canonical = folder.family.canonical_name(name)
        spec = folder.specs.get(canonical)
        if spec is None or tensor.dtype not in FLOAT_DTYPES:
            continue
        dtypes.add(tensor.dtype)
        if spec.role == "norm":
            layer = canonical.split(".")[1] if canonical.startswith("layers.") else ""
            where = "later layers" if layer not in ("", "0") else layer and "the first layer"
            norms[where].add(name.split(".")[-2])
    for where, names in norms.items():
        yield f"norms {', '.join(sorted(names))}" + (f" of {where}" if where else "")
    yield f"{' and '.join(sorted(dtypes))} in files"
    question, tables = folder.question, folder.stored.get("", {})
    cut = folder.geometry.draft_vocab_size < folder.geometry.vocab_size
    head = "stored" if "lm_head" in folder.stored else "absent"
    tied = ", tied" if question.is_tied else ""
    yield f"lm_head {head}{', for fewer tokens' if cut else ''}{tied}"
    yield f"embed_tokens {'stored' if 'embed_tokens' in folder.stored else 'absent'}"
    yield f"maps {' and '.join(sorted({'d2t', 't2d'} & tables.keys())) or 'absent'}"


@functools.cache
def _forms() -> Mapping[str, Mapping[str, Set[str]]]:
    """Engine -> kind of draft -> facts."""
    kept = parse_json(read_text(Path(__file__).with_name("executed_forms.json")))
    return {engine: {d: {*_facts(of)} for d, of in kinds.items()} for engine, kinds in kept.items()}


def _facts(kept: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Facts as they are kept: the others, and what takes linears by all of which it is taken."""
    for modules, facts in kept.items():
        names = modules.split(", ") if modules != "others" else ()
        yield from (f"{module} as {taken}" for module in names for taken in facts)
    yield from kept["others"]


def of_other_form(engine: Engine, form: DraftForm) -> Finding | None:
    """That no folder with one of its facts was executed; None where all were."""
    known = _forms().get(engine.name, {}).get(form.draft, set())
    other = next((fact for fact in form.facts if fact not in known), None)
    if other is None:
        return None
    what = f"{engine.title} was executed with other folders of {form.draft}, and none with {other}"
    return Finding("unknown", what, TRY)
