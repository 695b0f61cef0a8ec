"""Findings of a folder beyond single linears: names, tables, the vocabulary, shards."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..drafts import Family
from ..drafts.engine_traits import Finding
from ..drafts.family import TensorSpec
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.stored_declaration import COMPANIONS
from .built_linears import ROUTED, VOCAB_PADDING
from .config_rules import BIAS_KEYS
from .contract import Question, Verdict
from .engine import TRAITS, Engine

Stored = Mapping[str, Mapping[str, TensorInfo]]
"""Canonical module -> suffix -> tensor."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """One folder in one engine, with what the family expects of each canonical tensor name."""

    engine: Engine
    question: Question
    checkpoint: Checkpoint
    family: Family
    geometry: Any
    specs: Mapping[str, TensorSpec]

    @cached_property
    def stored(self) -> Stored:
        """Its tensors by canonical names."""
        stored: dict[str, dict[str, TensorInfo]] = {}
        for name, tensor in self.checkpoint.tensors.items():
            module, _, suffix = self.family.canonical_name(name).rpartition(".")
            stored.setdefault(module, {})[suffix] = tensor
        return stored


def folder_findings(folder: Folder) -> Iterator[Finding]:
    """Of tensors that are no linears, and of tables and shards."""
    engine, question = folder.engine, folder.question
    yield from _names(folder)
    yield from _cut_head(folder)
    yield from _absent(folder)
    yield from _shared_tables(folder)
    if "lm_head" not in folder.stored:
        yield from engine.rules("unshared_head", **unshared(question))
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


def _names(folder: Folder) -> Iterator[Finding]:
    """Tensors that are not the family's, that it spells otherwise, or that hold no numbers."""
    engine, question, roots = folder.engine, folder.question, folder.question.own.roots
    spellings = _SPELLINGS_OF_MTP if question.traits.is_mtp else _SPELLINGS
    linears = {part for built in engine.modules(question) for part in built.parts}
    declared = question.traits.is_mtp and question.declaration is not None
    for root, finding in roots.items():
        if finding is not None and any(n.startswith(root) for n in folder.checkpoint.tensors):
            yield finding
    for module, tensors in folder.stored.items():
        if ROUTED in module and (question.inside_target or declared):
            continue  # they are judged whole: `Walk`
        for suffix, tensor in tensors.items():
            name = tensor.name
            inner = next((name.removeprefix(root) for root in roots if name.startswith(root)), name)
            if suffix in COMPANIONS and f"{module}.weight" in folder.specs:
                if linears and module not in linears:
                    remedy = f"quantize the BF16 draft in a format that {engine.title} reads"
                    yield from _without_parameter(engine, question, name, remedy)
                continue
            if not spellings.match(inner) and _OF_LAYERS & set(name.split(".")):
                yield from engine.rules("stranger", name=name)
            elif f"{module}.{suffix}".lstrip(".") not in folder.specs:
                yield from strangers(engine, question, tensor)
            elif linears and module not in linears and tensor.dtype in _CODES:
                yield from engine.rules("plain_codes", name=name, stored_dtype=tensor.dtype)


def strangers(engine: Engine, question: Question, tensor: TensorInfo) -> Iterator[Finding]:
    """A tensor that the family does not have; of scales of a KV cache it is known who reads it."""
    name = tensor.name
    biased = name.endswith(".bias") and name.split(".")[-2] in built_biases(engine, question)
    if biased or name.endswith(_COMPUTED):
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
    facts = {"in_engine": name.replace("midlayer", "layers.0"), "remedy": remedy}
    how = question.own.unknown_tensors
    yield from engine.rules("no_parameter", name=name, unknown_tensors=how, **facts)


def _absent(folder: Folder) -> Iterator[Finding]:
    """Tensors of the family that are not stored; of linears `Walk` says it."""
    engine, question = folder.engine, folder.question
    leaves = built_biases(engine, question)
    if None in _asked(engine, question):
        yield from engine.rules("stranger", name="a bias")
    linears = dict.fromkeys(part for built in engine.modules(question) for part in built.parts)
    biased = [part for part in linears if part.rpartition(".")[2] in leaves]
    wanted = [name for name, spec in folder.specs.items() if not spec.optional]
    for name in (*wanted, *(f"{part}.bias" for part in biased if part in folder.stored)):
        module, _, suffix = name.rpartition(".")
        stored = folder.stored.get(module, {})
        is_judged = suffix == "weight" and (module in linears or bool(stored))
        if not is_judged and suffix not in stored:
            yield from engine.rules("absent", name=name)


def built_biases(engine: Engine, question: Question) -> frozenset[str]:
    """Leaves that get a bias by config.json, in addition to the family's own."""
    return frozenset().union(*(leaves or () for leaves in _asked(engine, question)))


def _asked(engine: Engine, question: Question) -> list[frozenset[str] | None]:
    keys = zip(BIAS_KEYS, engine.biases(question), strict=True)
    return [leaves for key, leaves in keys if question.config.get(key) is True]


# ---- A head with rows for fewer tokens than the vocabulary
# Loading and proposing were executed (`experiments/engines/RESULTS.md`). Draft id i stands for
# target id i + d2t[i]; no engine reads t2d.

_WEIGHTS = ("weight", "weight_packed")


def _cut_head(folder: Folder) -> Iterator[Finding]:
    """A head, its map and config.json of one number of rows were executed, and no others."""
    question, geometry, stored = folder.question, folder.geometry, folder.stored
    if question.own.shares_tables:
        return
    vocabulary, built = geometry.vocab_size, geometry.draft_vocab_size
    if (_rows(stored.get("embed_tokens", {}), ("weight",)) or vocabulary) != vocabulary:
        yield from folder.engine.rules("unlike", name="embed_tokens", stored_dtype="another size")
    if not question.traits.prunes_vocabulary:
        return
    is_cut = built < vocabulary
    rows = {
        "lm_head": _rows(stored.get("lm_head", {}), _WEIGHTS),
        "d2t": _rows(stored.get("", {}), ("d2t",)),
    }
    asked = vocabulary if question.config.get("draft_vocab_size") is None else built
    known = (asked,) if is_cut else (asked, None)
    if any(count not in known for count in rows.values()):
        yield from folder.engine.rules("cut_head", asked=asked, **rows)
    elif is_cut:
        yield from _wrong_tokens(folder, vocabulary)


def head_notes(folder: Folder, verdict: Verdict) -> Iterator[str]:
    """A note that a served head is cut."""
    rows, vocab = folder.geometry.draft_vocab_size, folder.geometry.vocab_size
    if verdict == "LOADS" and folder.question.traits.prunes_vocabulary and rows < vocab:
        yield (
            f"the head has rows for {rows:,} of {vocab:,} tokens, and {folder.engine.title}"
            " proposes these alone, by d2t"
        )


def _wrong_tokens(folder: Folder, vocabulary: int) -> Iterator[Finding]:
    """Findings on d2t: offsets, each row another token; none for a map that no file holds."""
    import numpy as np  # only for this question

    from ..stored.decoded_numbers import INTEGERS, read_integers, read_whole

    checkpoint, tables = folder.checkpoint, folder.stored[""]
    if not tables["d2t"].file or tables["d2t"].dtype not in INTEGERS:
        return
    offsets = read_integers(checkpoint, tables["d2t"])
    ids = offsets + np.arange(len(offsets))
    marked = np.flatnonzero(read_whole(checkpoint, tables["t2d"])) if "t2d" in tables else ids
    absolute = np.array_equal(offsets, marked) and not np.array_equal(ids, marked)
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    repeated = len(ids) - len(np.unique(ids))
    if absolute or len(outside) or repeated:
        yield from folder.engine.rules(
            "map",
            is_absolute=absolute,
            outside=str(outside[0]) if len(outside) else None,
            vocabulary=vocabulary,
            repeated=repeated,
            rows=len(ids),
        )


def _rows(tensors: Mapping[str, TensorInfo], suffixes: tuple[str, ...]) -> int | None:
    """Rows of the first of the tensors that is stored."""
    shapes = (tensors[suffix].shape for suffix in suffixes if suffix in tensors)
    return next((shape[0] for shape in shapes if shape), None)


# ---- Tables that are the target's, and shards


def unshared(question: Question) -> dict[str, Any]:
    """Facts of a draft without a head of its own."""
    named = question.config.get("draft_vocab_size") is not None
    return {**question.facts, "has_draft_vocab_size": named}


def _shared_tables(folder: Folder) -> Iterator[Finding]:
    question, stored = folder.question, folder.stored
    if not question.own.shares_tables:
        return
    whole = question.head_rows in (None, question.config.get("vocab_size"))
    pruned = "d2t" in stored.get("", {}) or not whole
    for module in SHARED[1:] if question.own.quantizes_fc(question) else SHARED:
        yield from folder.engine.rules(
            "shared",
            module=module,
            is_cut=pruned,
            is_stored=module in stored,
            has_companions=bool(COMPANIONS & stored.get(module, {}).keys()),
        )


def undivided(tp: int, config: Mapping[str, Any]) -> str | None:
    """What in a config so many GPUs cannot share; missing keys are no obstacle.

    Engines divide query heads evenly, divide or repeat heads of keys and values, and divide the
    columns of the MLP and the rows of embedding and head, which are padded to multiples of 64.
    Source: vLLM 0.33 `config/model.py:1557`, `QKVParallelLinear`, `VocabParallelEmbedding`; SGLang
    0.5.23 has the same layers.
    """
    heads, few = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and heads % tp:
        return f"{heads} attention heads"
    if type(few) is int and few > 0 and few % tp and tp % few and "kv_lora_rank" not in config:
        return f"{few} heads of keys and values"
    for key in ("intermediate_size", "moe_intermediate_size"):
        width = config.get(key)
        if type(width) is int and width % tp:
            return f"{key} of {width}"
    vocab = config.get("vocab_size")
    if type(vocab) is int and -(-vocab // VOCAB_PADDING) * VOCAB_PADDING % tp:
        return f"vocabulary of {vocab}, padded to a multiple of {VOCAB_PADDING},"
    return None
