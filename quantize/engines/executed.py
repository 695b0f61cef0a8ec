"""What was executed: `check` says LOADS of such drafts and of no other.

`executed_forms.json` is what `experiments/run forms` found: by engine, or of both, and kind of
draft, the facts of all folders that were loaded. A folder has an executed form if each of its facts
is among them.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from ...recipes.regular_file import read_text
from ...recipes.strict_json import parse_json
from ..drafts.architectures import declared_architecture
from ..drafts.config_reader import KEY, KNOWN, SECTION, object_at
from ..drafts.engine_traits import Finding
from ..drafts.recognition import is_speculators
from ..stored.layouts.scheme import FLOAT_DTYPES
from .built_linears import ROUTED
from .contract import TRY, DraftForm, Linears, Question
from .engine import Engine

_SECTIONS = (SECTION, "dflash_config")
_OF_ROPE = ("rope_parameters", "rope_scaling")
"""Of MTP layers; what engines do with other drafts' is said by the rows of ropes."""
_NULLS = frozenset(
    """
    attention_bias attention_dropout auto_map dflash_config eagle_config head_dim hidden_act
    initializer_range max_position_embeddings max_window_layers mlp_bias num_key_value_heads
    tie_word_embeddings use_aux_hidden_state use_cache use_sliding_window
    """.split()  # noqa: SIM905 - one a line would be a page
)
"""Keys of which null differs from a missing key, in some class of Transformers or engine."""
_LISTS = (KEY, "target_layer_ids", "layer_types")
_FLAGS = KNOWN - {"use_cache"}
_FLOATS = "floats"
_VALUES = ("weight", "weight_packed", "qweight")


def form_of(question: Question, built: Linears, written: Mapping[str, Any]) -> DraftForm:
    """The form of a folder as an engine builds it; `written`: its config.json as it is stored."""
    name = declared_architecture(question.config) or ""
    linears: dict[str, set[str]] = defaultdict(set)
    for module, taken in built.items():
        linears[module.rpartition(".")[2]].add(taken or _FLOATS)
    stored = question.checkpoint.tensors.items()
    experts = {t.dtype for n, t in stored if ROUTED in n and n.rpartition(".")[2] in _VALUES}
    if experts:
        stack = "stacked " if question.checkpoint.stacks_experts else ""
        floats = experts <= set(FLOAT_DTYPES)
        linears[f"{stack}experts"].add(_FLOATS if floats else str(question.signature or ""))
    return DraftForm(
        draft=name if question.traits.is_mtp else question.family.name,
        layers=question.num_layers,
        linears={module: " and ".join(sorted(taken)) for module, taken in linears.items()},
        others=(
            *_of_config(question.config, fuses=question.geometry.fuses, mtp=question.traits.is_mtp),
            *_nulls(written, str(question.config.get("model_type"))),
            "the speculators layout" if is_speculators(written) else "an ordinary config.json",
            "inside its target" if question.inside_target else "a folder of its own",
            *_of_tensors(question),
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


def _nulls(keys: Mapping[str, Any], model_type: str, section: str = "") -> Iterator[str]:
    for key, value in sorted(keys.items()):
        if value is None and key in _NULLS:
            yield f"{section}{key} null of {model_type}"
        elif isinstance(value, Mapping):
            yield from _nulls(value, model_type, f"{section}{key}.")


def _of_tensors(question: Question) -> Iterator[str]:
    norms: dict[str, set[str]] = defaultdict(set)
    dtypes = set()
    for name, tensor in question.checkpoint.tensors.items():
        canonical = question.family.canonical_name(name)
        spec = question.specs.get(canonical)
        if spec is None or tensor.dtype not in FLOAT_DTYPES:
            continue
        dtypes.add(tensor.dtype)
        if spec.role == "norm" and not canonical.endswith(".bias"):
            layer = canonical.split(".")[1] if canonical.startswith("layers.") else ""
            norms[layer].add(name.split(".")[-2])
    for layer, names in norms.items():
        where = " of later layers" if layer not in ("", "0") else layer and " of the first layer"
        yield f"norms {', '.join(sorted(names))}{where}"
    yield f"{' and '.join(sorted(dtypes))} in files"
    tables = question.stored.get("", {})
    cut = question.geometry.draft_vocab_size < question.geometry.vocab_size
    head = "stored" if "lm_head" in question.stored else "absent"
    tied = ", tied" if question.is_tied else ""
    yield f"lm_head {head}{', for fewer tokens' if cut else ''}{tied}"
    yield f"embed_tokens {'stored' if 'embed_tokens' in question.stored else 'absent'}"
    yield f"maps {' and '.join(sorted({'d2t', 't2d'} & tables.keys())) or 'absent'}"


@functools.cache
def _forms() -> Mapping[tuple[str, str], Set[str]]:
    """Engine and kind of draft -> facts: the others, and by what each linear was taken."""
    forms: dict[tuple[str, str], set[str]] = defaultdict(set)
    kept = parse_json(read_text(Path(__file__).with_name("executed_forms.json")))
    both = kept.pop("both").items()
    for engine, own in kept.items():
        for draft, named in (*own.items(), *both):
            for modules, facts in named.items():
                linears = [f"{module} as " for module in modules.split(", ")]
                begun = [""] if modules == "others" else linears
                forms[engine, draft] |= {begin + fact for begin in begun for fact in facts}
    return forms


def of_other_form(engine: Engine, form: DraftForm) -> Finding | None:
    """That no folder with one of its facts was executed; None where all were."""
    known = _forms().get((engine.name, form.draft), set())
    other = next((fact for fact in form.facts if fact not in known), None)
    if other is None:
        return None
    what = f"{engine.title} was executed with other folders of {form.draft}, and none with {other}"
    return Finding("unknown", what, TRY)
