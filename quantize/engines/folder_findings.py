"""Findings of a folder beyond single linears: names, tables, the vocabulary, shards."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..drafts.engine_traits import Finding
from ..files.safetensors_header import TensorInfo
from ..stored.stored_declaration import COMPANIONS
from .built_linears import ROUTED
from .contract import Question
from .engine import TRAITS, BuildingEngine, Engine


def folder_findings(engine: BuildingEngine, question: Question) -> Iterator[Finding]:
    """Of tensors that are no linears, and of tables and shards."""
    linears = dict.fromkeys(part for built in engine.modules(question) for part in built.parts)
    yield from _names(engine, question, linears)
    yield from _cut_head(engine, question)
    yield from _absent(engine, question, linears)
    yield from _shared_tables(engine, question)
    if "lm_head" not in question.stored:
        yield from engine.rules("unshared_head", **question.facts)
    if (rest := undivided(question.tp, question.config)) is not None:
        yield from engine.rules("shards", undivided=rest, tp=question.tp)


# ---- Names: a closed list, with which loading was executed; of any other the engine is to be asked

_OF_FAMILIES = "".join(f"|{name}" for traits in TRAITS for name in traits.module_names)
_SPELLINGS = re.compile(
    rf"(midlayer|layers\.\d+|fc|norm|hidden_norm|lm_head|embed_tokens{_OF_FAMILIES}"
    r"|fc_norm\.\d|input_norm)\.|[dt]2[dt]$|mask_hidden$"
)
_SPELLINGS_OF_MTP = re.compile(
    r"model\.(mtp_layers|layers)\.\d+\.|model\.(language_model\.)?embed_tokens\.|lm_head\.|mtp\."
)
"""The same for MTP layers, under the names of their targets."""
_OF_LAYERS = frozenset(
    {"self_attn", "mlp", "fc", "norm", "lm_head", "embed_tokens", "d2t", "t2d", "layers"}
)
"""Parts of names that all drafts' tensors have; those of one family have one spelling."""
CACHE_SCALE = re.compile(
    r"\.(?:[qkv]_scale|kv_scale|output_scale|prob_output_scale|[qkv]_zero_point)$"
)
"""Names of scales of the KV cache, as exporters spell them."""
_COMPUTED = ".inv_freq"  # rotary frequencies, which both engines drop and compute from config.json
_CODES = ("F8_E4M3", "I8", "U8")
SHARED = ("embed_tokens", "lm_head")


def _names(
    engine: BuildingEngine, question: Question, linears: Collection[str]
) -> Iterator[Finding]:
    """Tensors that are not the family's, that it spells otherwise, or that hold no numbers."""
    roots = question.own.roots
    spellings = _SPELLINGS_OF_MTP if question.traits.is_mtp else _SPELLINGS
    declared = question.traits.is_mtp and question.declaration is not None
    for root, finding in roots.items():
        if finding is not None and any(n.startswith(root) for n in question.tensor_names):
            yield finding
    for module, tensors in question.stored.items():
        if ROUTED in module and (question.inside_target or declared):
            continue  # they are judged whole: `Walk`
        is_plain = linears and module not in linears
        for suffix, tensor in tensors.items():
            name = tensor.name
            inner = next((name.removeprefix(root) for root in roots if name.startswith(root)), name)
            if suffix in COMPANIONS and f"{module}.weight" in question.specs:
                if is_plain:
                    remedy = f"quantize the BF16 draft in a format that {engine.title} reads"
                    yield from _without_parameter(engine, question, name, remedy)
            elif not spellings.match(inner) and _OF_LAYERS & set(name.split(".")):
                yield from engine.rules("stranger", name=name)
            elif f"{module}.{suffix}".lstrip(".") not in question.specs:
                yield from strangers(engine, question, tensor)
            elif is_plain and tensor.dtype in _CODES:
                yield from engine.rules("plain_codes", name=name, stored_dtype=tensor.dtype)


def strangers(engine: BuildingEngine, question: Question, tensor: TensorInfo) -> Iterator[Finding]:
    """A tensor that the family does not have; of scales of a KV cache it is known who reads it."""
    name = tensor.name
    if name.endswith(_COMPUTED):
        return
    read = engine.cache_scale(question, tensor) if CACHE_SCALE.search(name) else None
    if read is None:
        yield from engine.rules("stranger", name=name)
    elif not read:
        remedy = f"remove {name}: without it an FP8 KV cache is served with a scale of 1"
        yield from _without_parameter(engine, question, name, remedy)


def _without_parameter(
    engine: Engine, question: Question, name: str, remedy: str
) -> Iterator[Finding]:
    names = {"name": name, "in_engine": name.replace("midlayer", "layers.0")}
    how = question.own.unknown_tensors
    yield from engine.rules("no_parameter", unknown_tensors=how, remedy=remedy, **names)


def _absent(engine: Engine, question: Question, linears: Collection[str]) -> Iterator[Finding]:
    """Tensors of the family that are not stored; of linears `Walk` says it."""
    stored = question.stored
    for name in (name for name, spec in question.specs.items() if not spec.optional):
        module, _, suffix = name.rpartition(".")
        is_judged = suffix == "weight" and (module in linears or module in stored)
        if not is_judged and suffix not in stored.get(module, {}):
            yield from engine.rules("absent", name=name)


# ---- A head with rows for fewer tokens than the vocabulary
# Loading and proposing were executed (`experiments/engines/RESULTS.md`). Draft id i stands for
# target id i + d2t[i]; no engine reads t2d.


def _cut_head(engine: Engine, question: Question) -> Iterator[Finding]:
    """A head, its map and config.json of one number of rows were executed, and no others."""
    vocabulary = question.geometry.vocab_size
    if question.own.shares_tables:
        return
    if (_rows(question, "embed_tokens.weight") or vocabulary) != vocabulary:
        yield from engine.rules("unlike", name="embed_tokens", stored_dtype="another size")
    if not question.traits.prunes_vocabulary:
        return
    built = question.geometry.draft_vocab_size
    head = _rows(question, "lm_head.weight", "lm_head.weight_packed")
    rows = {"lm_head": head, "d2t": _rows(question, "d2t")}
    asked = vocabulary if question.config.get("draft_vocab_size") is None else built
    known = (asked,) if built < vocabulary else (asked, None)
    if any(count not in known for count in rows.values()):
        yield from engine.rules("cut_head", asked=asked, **rows)
    elif built < vocabulary:
        yield from _wrong_tokens(engine, question)


def _rows(question: Question, *names: str) -> int | None:
    places = (name.rpartition(".") for name in names)
    found = (question.stored.get(module, {}).get(suffix) for module, _, suffix in places)
    return next((tensor.shape[0] for tensor in found if tensor and tensor.shape), None)


def absent_tables(engine: Engine, question: Question) -> Iterator[str]:
    """What replaces each table that the draft does not have."""
    is_served = engine.rule("unshared_head", **question.facts) is None
    unneeded = {"lm_head"} if question.is_tied or not is_served else set()
    absent = engine.absent_tables.keys() - question.stored.keys() - unneeded
    yield from (text for table, text in engine.absent_tables.items() if table in absent)


def _wrong_tokens(engine: Engine, question: Question) -> Iterator[Finding]:
    """Findings on d2t; none for a map that no file holds, or whose numbers cannot be read."""
    from ..lints.vocabulary_map import VocabularyMap  # numpy: only for this question

    vocabulary, tables = question.geometry.vocab_size, question.stored[""]
    if not tables["d2t"].file or not (table := VocabularyMap.read(question.checkpoint, tables)):
        return
    outside = table.outside(vocabulary)
    if table.is_absolute or outside or table.repeated:
        yield from engine.rules(
            "map",
            is_absolute=table.is_absolute,
            outside=str(table.ids[outside[0]]) if outside else None,
            vocabulary=vocabulary,
            repeated=table.repeated,
            rows=len(table.ids),
        )


# ---- Tables that are the target's, and shards


def _shared_tables(engine: Engine, question: Question) -> Iterator[Finding]:
    stored = question.stored
    if not question.own.shares_tables:
        return
    whole = question.head_rows in (None, question.config.get("vocab_size"))
    for module in SHARED[1:] if question.own.quantizes_fc(question) else SHARED:
        yield from engine.rules(
            "shared",
            module=module,
            is_cut="d2t" in stored.get("", {}) or not whole,
            is_stored=module in stored,
            has_companions=bool(COMPANIONS & stored.get(module, {}).keys()),
        )


VOCAB_PADDING = 64
"""Rows of a head are padded to a multiple of this before they are split."""


def undivided(tp: int, config: Mapping[str, Any]) -> str | None:
    """What in a config so many GPUs cannot share; missing keys are no obstacle.

    Engines divide query heads evenly, divide or repeat heads of keys and values, and divide the
    columns of the MLP and the rows of embedding and head, which are padded to multiples of 64.
    Source: vLLM 0.33 `config/model.py:1557`, `QKVParallelLinear`, `VocabParallelEmbedding`; SGLang
    0.5.23 has the same layers.
    """
    heads, few = config.get("num_attention_heads"), config.get("num_key_value_heads")
    widths = {key: config.get(key) for key in ("intermediate_size", "moe_intermediate_size")}
    vocab = config.get("vocab_size")
    if type(heads) is int and heads % tp:
        return f"{heads} attention heads"
    if type(few) is int and few > 0 and few % tp and tp % few and "kv_lora_rank" not in config:
        return f"{few} heads of keys and values"
    for key, width in widths.items():
        if type(width) is int and width % tp:
            return f"{key} of {width}"
    if type(vocab) is int and -(-vocab // VOCAB_PADDING) * VOCAB_PADDING % tp:
        return f"vocabulary of {vocab}, padded to a multiple of {VOCAB_PADDING},"
    return None
