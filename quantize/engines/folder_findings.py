"""Findings of a folder beyond single linears: unknown names, norms, the vocabulary, shards."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...recipes.brief import first_of
from ..drafts import Family
from ..drafts.engine_traits import Finding
from ..drafts.family import TensorSpec
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.stored_declaration import COMPANIONS
from .built_linears import ROUTED
from .config_rules import BIAS_KEYS
from .contract import Question, Verdict
from .engine import TRAITS, Engine

# ---- A head with rows for fewer tokens than the vocabulary
# Loading and proposing were executed (`experiments/engines/RESULTS.md`). Draft id i stands for
# target id i + d2t[i]; no engine reads t2d.

_WEIGHTS = ("weight", "weight_packed")

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


def _cut_head(folder: Folder) -> Iterator[Finding]:
    """Findings: a head without its map, a map without its head, a map with wrong tokens."""
    question, geometry, stored = folder.question, folder.geometry, folder.stored
    if not question.traits.prunes_vocabulary or question.own.shares_tables:
        return
    vocabulary, built = geometry.vocab_size, geometry.draft_vocab_size
    is_declared, is_cut = question.config.get("draft_vocab_size") is not None, built < vocabulary
    stored_rows = _rows(stored.get("lm_head", {}), _WEIGHTS)
    mapped = _rows(stored.get("", {}), ("d2t",))
    asked = built if is_declared else vocabulary
    yield from folder.engine.rules(
        "cut_head",
        is_tied=question.is_tied,
        vocabulary=vocabulary,
        built=built,
        is_cut=is_cut,
        is_declared=is_declared,
        is_stored=stored_rows is not None,
        stored_rows=stored_rows,
        is_of_other_rows=stored_rows not in (None, asked),
        mapped_rows=mapped,
        has_map=mapped is not None,
        has_other_map=mapped not in (None, asked),
        has_linears=bool(folder.engine.modules(question)),
    )
    if is_cut and mapped is not None:
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
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    repeated = len(ids) - len(np.unique(ids))
    if absolute:
        yield from folder.engine.rules("absolute_map")
    elif len(outside):
        row = int(outside[0])
        told = int(ids[row])
        yield from folder.engine.rules("map", rows=row, built=told, vocabulary=vocabulary)
    elif repeated:
        yield from folder.engine.rules("map", rows=repeated, built=len(ids), is_mixed=True)


def _rows(tensors: Mapping[str, TensorInfo], suffixes: tuple[str, ...]) -> int | None:
    """Rows of the first of the tensors that is stored."""
    shapes = (tensors[suffix].shape for suffix in suffixes if suffix in tensors)
    return next((shape[0] for shape in shapes if shape), None)


_OF_FAMILIES = "".join(f"|{name}" for traits in TRAITS for name in traits.module_names)
_SPELLINGS = re.compile(
    rf"(midlayer|layers\.\d+|fc|norm|hidden_norm|lm_head|embed_tokens{_OF_FAMILIES}"
    r"|fc_norm\.\d|input_norm|aux_norm_(low|mid|high))\.|[dt]2[dt]$|mask_hidden$"
)
"""Names on disk with which loading was executed; other spellings of the families were not."""
_SPELLINGS_OF_MTP = re.compile(
    r"model\.(mtp_layers|layers)\.\d+\.|model\.(language_model\.)?embed_tokens\.|lm_head\.|mtp\."
)
"""The same for MTP layers, under the names of their targets."""
CACHE_SCALE = re.compile(
    r"\.(?:[qkv]_scale|kv_scale|output_scale|prob_output_scale|[qkv]_zero_point)$"
)
"""Names of scales of the KV cache, as exporters spell them."""
_COMPUTED = ".inv_freq"  # rotary frequencies, which both engines drop and compute from config.json
_OF_LAYERS = frozenset(
    {"self_attn", "mlp", "fc", "norm", "lm_head", "embed_tokens", "d2t", "t2d", "layers"}
)
"""Parts of names that only drafts' tensors have; under an unusual root they may be read."""
_BESIDE_CODES = COMPANIONS | {"input_scale_2", "input_zero_point", "g_idx", "weight_g_idx"}
_CODES = ("F8_E4M3", "I8", "U8")
_SILENT = (".bias", ".input_zero_point")
"""Ends of names that no loader misses."""
SHARED = ("embed_tokens", "lm_head")


def folder_findings(folder: Folder) -> Iterator[Finding]:
    """Tensors that are not the family's, and missing or badly split ones of the family."""
    engine, question, stored = folder.engine, folder.question, folder.stored
    checkpoint, specs = folder.checkpoint, folder.specs
    linears = {part for built in engine.modules(question) for part in built.parts}
    yield from _partly_kept(folder)
    roots = question.own.roots
    for root, finding in roots.items():
        if finding is not None and any(name.startswith(root) for name in checkpoint.tensors):
            yield finding
    spellings = _SPELLINGS_OF_MTP if question.traits.is_mtp else _SPELLINGS
    unusual = set()
    for name in checkpoint.tensors:
        inner = next((name.removeprefix(root) for root in roots if name.startswith(root)), name)
        if not spellings.match(inner) and _OF_LAYERS & set(name.split(".")):
            unusual.add(name)
    for name in sorted(unusual):
        yield from engine.rules("unusual_name", name=name)
    for module, tensors in stored.items():
        declared = question.traits.is_mtp and question.declaration is not None
        if ROUTED in module and (question.inside_target or declared):
            continue  # they are judged whole: `built_linears.sglang_problem`
        for suffix, tensor in tensors.items():
            plain = f"{module}.{suffix}".lstrip(".") in specs
            companion = suffix in _BESIDE_CODES and (module in linears or not linears)
            old = tensor.name.startswith("aux_norm_") and not question.own.old_norms
            known = companion and f"{module}.weight" in specs
            if old or not (plain or known or tensor.name in unusual):
                yield from strangers(engine, question, tensor)
            if plain and linears and module not in linears and tensor.dtype in _CODES:
                named = {"name": tensor.name, "stored_dtype": tensor.dtype, "module": module}
                yield from engine.rules("plain_codes", **named)
    yield from _other_vocabulary(folder)
    yield from _cut_head(folder)
    yield from _later_norms(folder)
    yield from _bias_findings(engine, question, stored)
    refused = question.own.refuses_absent_norm and question.declaration is None
    for name, spec in specs.items():
        module, _, suffix = name.rpartition(".")
        if spec.role == "norm" and not spec.optional and suffix not in stored.get(module, {}):
            yield from engine.rules("absent_norm", name=name, is_read=refused)
    yield from _shared_tables(folder)
    if "lm_head" not in stored:
        yield from engine.rules("unshared_head", **unshared(question))
    yield from _uneven_shards(folder)


def _partly_kept(folder: Folder) -> Iterator[Finding]:
    """A layer of a target of which its quantizer dropped some tensors."""
    if not folder.question.traits.is_mtp:
        return
    absent = [
        name
        for name, spec in folder.specs.items()
        if not spec.optional and name.rpartition(".")[0] not in folder.stored
    ]
    if absent:
        layer, names = folder.checkpoint.subtree or "the MTP layer", first_of(absent, 2)
        yield from folder.engine.rules("part", rows=len(absent), module=layer, name=names)


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


def _uneven_shards(folder: Folder) -> Iterator[Finding]:
    """Heads and inner widths that the shards cannot share evenly."""
    config, tp, in_engine = folder.question.config, folder.question.tp, folder.question.own
    heads, width = config.get("num_attention_heads", 0), config.get("intermediate_size", 0)
    kept = config.get("num_key_value_heads")
    kept = kept if type(kept) is int and kept > 0 else heads
    left = {
        f"total_num_heads = {heads}": heads % tp,
        f"total_num_kv_heads = {kept}": max(kept, tp) % min(kept or tp, tp),
        f"intermediate_size = {width}": width % tp,
    }
    problem = folder.engine.rule(
        "shards",
        uneven_heads=in_engine.uneven_heads.format(heads=heads, tp=tp) if heads % tp else None,
        heads=heads,
        uneven=next((name for name, rest in left.items() if rest), None),
        tp=tp,
    )
    yield from filter(None, [problem])


def _other_vocabulary(folder: Folder) -> Iterator[Finding]:
    vocab, embedding = folder.geometry.vocab_size, folder.stored.get("embed_tokens", {})
    rows = _rows(embedding, ("weight",)) or vocab
    if rows != vocab and not folder.question.own.shares_tables:
        yield from folder.engine.rules("vocabulary", rows=rows, vocabulary=vocab)


def _later_norms(folder: Folder) -> Iterator[Finding]:
    """EAGLE-3's layers after the first: engines use one of two norms, and build both."""
    question, wanted = folder.question, folder.engine.later_norm
    if not question.traits.two_layer_norms or not wanted:
        return
    names = folder.checkpoint.tensors
    for i in range(1, question.num_layers):
        norm = folder.stored.get(f"layers.{i}.input_layernorm", {}).get("weight")
        has_wanted = any(name.endswith(f"layers.{i}.{wanted}.weight") for name in names)
        if norm is not None and not has_wanted:
            named = {"module": f"model.layers.{i}.{wanted}", "leaf": wanted, "name": norm.name}
            yield from folder.engine.rules("later_norm", **named)


def strangers(engine: Engine, question: Question, tensor: TensorInfo) -> Iterator[Finding]:
    """A tensor that may have no parameter; no engine minds a bias."""
    name = tensor.name
    remedy = f"remove {name} only if the draft was trained without it"
    if name.rpartition(".")[2] in _BESIDE_CODES:
        remedy = f"quantize the BF16 draft in a format that {engine.title} reads"
    if name.endswith(_COMPUTED):
        return
    if name.endswith(".bias") and name.split(".")[-2] in built_biases(engine, question):
        return
    if CACHE_SCALE.search(name):
        read = engine.cache_scale(question, tensor)
        if read is None:
            yield Finding("unknown", f"Loading a tensor called {name} was never executed", remedy)
        if read is not False:
            return
        remedy = f"remove {name}: without it an FP8 KV cache is served with a scale of 1"
    dropped = name.startswith(question.own.dropped(question)) or name.endswith(_SILENT)
    problem = engine.rule(
        "stranger",
        name=name,
        in_engine=name.replace("midlayer", "layers.0"),
        unknown_tensors="dropped" if dropped else question.own.unknown_tensors,
        remedy=remedy,
    )
    yield from filter(None, [problem])


def built_biases(engine: Engine, question: Question) -> frozenset[str]:
    """Leaves that get a bias by config.json, in addition to the family's own."""
    return frozenset().union(*(leaves or () for leaves in _asked(engine, question)))


def _bias_findings(
    engine: Engine, question: Question, stored: Mapping[str, Any]
) -> Iterator[Finding]:
    """Biases that are built and not stored, and keys whose effect is not known."""
    if None in _asked(engine, question):
        yield from engine.rules("biases")
    built = built_biases(engine, question)
    for module in engine.modules(question) if built else ():
        for part in module.parts:
            biased = part.rpartition(".")[2] in built
            if biased and part in stored and "bias" not in stored[part]:
                yield from engine.rules("absent_bias", module=module.name, name=part)


def _asked(engine: Engine, question: Question) -> list[frozenset[str] | None]:
    built = engine.biases(question)
    return [
        leaves
        for key, leaves in zip(BIAS_KEYS, built, strict=True)
        if question.config.get(key) is True
    ]
