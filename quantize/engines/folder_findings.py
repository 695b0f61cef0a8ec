"""What of a folder belongs to no single linear: unknown names, norms, the vocabulary, shards."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..drafts.engine_traits import Finding
from ..drafts.family import TensorSpec
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.stored_declaration import COMPANIONS
from .built_linears import bias_findings, built_biases
from .contract import CutHead, Module, Question, Verdict
from .engine import TRAITS, Engine
from .mtp_linears import ROUTED

# ---- A head with rows for fewer tokens than the vocabulary
# Loading and proposing were executed (`tests/engines/RESULTS.md`). Draft id i stands for target id
# i + d2t[i]; no engine reads t2d.

_WEIGHTS = ("weight", "weight_packed")
_EXPORT = "export d2t again: the rows of lm_head and their target ids do not match"
_SUBTRACT = "subtract arange(draft_vocab_size) from d2t"

Stored = Mapping[str, Mapping[str, TensorInfo]]
"""Canonical module -> suffix -> tensor."""


def cut_head_findings(
    engine: Engine, question: Question, checkpoint: Checkpoint, geometry: Any, stored: Stored
) -> Iterator[Finding]:
    """A head without its map, a map without its head, a map that names wrong tokens."""
    tables = stored.get("", {})
    head = CutHead(
        vocabulary=geometry.vocab_size,
        built=geometry.draft_vocab_size,
        is_declared=question.config.get("draft_vocab_size") is not None,
        stored=_rows(stored.get("lm_head", {}), _WEIGHTS),
        mapped=_rows(tables, ("d2t",)),
    )
    if not question.traits.prunes_vocabulary or question.own.shares_tables:
        return
    yield from engine.cut_head(question, head)
    if not head.is_cut:
        return
    if head.mapped is None:
        yield Finding(
            "wrong",
            f"The head has {head.built} tokens and no map d2t is stored: {engine.title} takes the"
            " tokens that the draft proposes for other tokens of the target",
            "export the draft with d2t",
        )
    else:
        yield from _wrong_tokens(engine, checkpoint, head, tables)


def head_notes(
    engine: Engine, question: Question, geometry: Any, verdict: Verdict
) -> Iterator[str]:
    """That a served head is cut."""
    rows, vocab = geometry.draft_vocab_size, geometry.vocab_size
    if verdict == "LOADS" and question.traits.prunes_vocabulary and rows < vocab:
        yield (
            f"the head has rows for {rows:,} of {vocab:,} tokens, and {engine.title} proposes"
            " these alone, by d2t"
        )


def _wrong_tokens(
    engine: Engine, checkpoint: Checkpoint, head: CutHead, tables: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """The numbers in d2t: offsets, each row another token; nothing of a map that no file holds."""
    import numpy as np  # for this question alone

    from ..stored.decoded_numbers import INTEGERS, read_integers, read_whole

    if not tables["d2t"].file or tables["d2t"].dtype not in INTEGERS:
        return
    offsets = read_integers(checkpoint, tables["d2t"])
    ids = offsets + np.arange(len(offsets))
    marked = np.flatnonzero(read_whole(checkpoint, tables["t2d"])) if "t2d" in tables else ids
    absolute = np.array_equal(offsets, marked) and not np.array_equal(ids, marked)
    outside = np.flatnonzero((ids < 0) | (ids >= head.vocabulary))
    repeated = len(ids) - len(np.unique(ids))
    if absolute:
        text = (
            f"d2t holds target ids, and {engine.title} adds the number of the row to each: the"
            " draft proposes other tokens, or fails at the first request"
        )
        yield Finding("wrong", text, _SUBTRACT)
    elif len(outside):
        row = int(outside[0])
        text = (
            f"d2t makes row {row} of the head stand for target id {ids[row]}, outside the"
            f" vocabulary of {head.vocabulary}: {engine.title} loads the draft, which proposes"
            " tokens that do not exist, or fails at the first request"
        )
        yield Finding("wrong", text, _EXPORT)
    elif repeated:
        text = (
            f"{repeated} of {len(ids)} rows of d2t stand for a token for which another row stands:"
            f" {engine.title} loads the draft, which never proposes the tokens that these rows"
            " were trained for"
        )
        yield Finding("wrong", text, _EXPORT)


def _rows(tensors: Mapping[str, TensorInfo], suffixes: tuple[str, ...]) -> int | None:
    """Of the first of the tensors that is stored."""
    found = (tensors[suffix].shape for suffix in suffixes if suffix in tensors)
    return next((shape[0] for shape in found if shape), None)


_OF_FAMILIES = "".join(f"|{name}" for traits in TRAITS for name in traits.module_names)
_SPELLINGS = re.compile(
    rf"(midlayer|layers\.\d+|fc|norm|hidden_norm|lm_head|embed_tokens{_OF_FAMILIES}"
    r"|fc_norm\.\d|input_norm|aux_norm_(low|mid|high))\.|[dt]2[dt]$|mask_hidden$"
)
"""Names on disk with which loading was executed; other spellings of the families were not."""
_SPELLINGS_OF_MTP = re.compile(
    r"model\.(mtp_layers|layers)\.\d+\.|model\.(language_model\.)?embed_tokens\.|lm_head\.|mtp\."
)
"""Of MTP layers, under the names of their targets."""
CACHE_SCALE = re.compile(
    r"\.(?:[qkv]_scale|kv_scale|output_scale|prob_output_scale|[qkv]_zero_point)$"
)
"""Names of scales of the KV cache, as exporters spell them."""
_COMPUTED = ".inv_freq"  # rotary frequencies, which both engines drop and compute from config.json
_OF_LAYERS = frozenset(
    {"self_attn", "mlp", "fc", "norm", "lm_head", "embed_tokens", "d2t", "t2d", "layers"}
)
"""Parts of names that only a tensor of a draft has; under an unusual root it may be read."""
_BESIDE_CODES = COMPANIONS | {"input_scale_2", "input_zero_point", "g_idx", "weight_g_idx"}
_CODES = ("F8_E4M3", "I8", "U8")
SHARED = ("embed_tokens", "lm_head")


def folder_findings(
    engine: Engine,
    question: Question,
    checkpoint: Checkpoint,
    specs: Mapping[str, TensorSpec],
    geometry: Any,
    stored: Stored,
) -> Iterator[Finding]:
    """Tensors that are not the family's, and those of its that are absent or split badly."""
    linears = {part for built in engine.modules(question) for part in built.parts}
    roots = question.own.roots
    for root, finding in roots.items():
        if finding is not None and any(name.startswith(root) for name in checkpoint.tensors):
            yield finding
    spellings = _SPELLINGS_OF_MTP if question.traits.is_mtp else _SPELLINGS
    unusual = {
        name
        for name in checkpoint.tensors
        if not spellings.match(_inner(name, roots)) and _OF_LAYERS & set(name.split("."))
    }
    for name in sorted(unusual):
        text = f"Loading a tensor called {name} was never executed"
        yield Finding("unknown", text, "use the names of the published drafts")
    for module, tensors in stored.items():
        declared = question.traits.is_mtp and question.declaration is not None
        if ROUTED in module and (question.inside_target or declared):
            continue  # see `mtp`
        for suffix, tensor in tensors.items():
            plain = f"{module}.{suffix}".lstrip(".") in specs
            companion = suffix in _BESIDE_CODES and (module in linears or not linears)
            old = tensor.name.startswith("aux_norm_") and not question.own.old_norms
            known = companion and f"{module}.weight" in specs
            if old or not (plain or known or tensor.name in unusual):
                yield from strangers(engine, question, tensor)
            if plain and linears and module not in linears and tensor.dtype in _CODES:
                text = (
                    f"{engine.title} reads {tensor.name}, which is stored as {tensor.dtype}, as"
                    " plain numbers without scales"
                )
                yield Finding("wrong", text, f"keep {module} in BF16")
    yield from _other_vocabulary(engine, question, geometry, stored)
    yield from cut_head_findings(engine, question, checkpoint, geometry, stored)
    yield from _later_norms(engine, question, stored)
    yield from bias_findings(engine, question, stored)
    for name, spec in specs.items():
        module, _, suffix = name.rpartition(".")
        if spec.role == "norm" and not spec.optional and suffix not in stored.get(module, {}):
            yield _absent_norm(question, name)
    yield from _shared_tables(engine, question, stored)
    if "lm_head" not in stored and (unshared := engine.unshared_head(question)) is not None:
        yield unshared
    yield from _uneven_shards(question)


def _shared_tables(engine: Engine, question: Question, stored: Stored) -> Iterator[Finding]:
    if question.own.shares_tables:
        rows, vocab = question.head_rows, question.config.get("vocab_size")
        pruned = "d2t" in stored.get("", {}) or rows not in (None, vocab)
        if pruned:
            text = (
                f"{engine.title} drops d2t and lm_head: the draft then proposes tokens of the whole"
                " vocabulary with the target's head"
            )
            yield Finding("wrong", text, "serve it with vLLM, or the draft with its whole head")
        for module in SHARED:
            if module in stored and COMPANIONS & stored[module].keys():
                text = f"{engine.title} drops {module}, which is quantized, and serves the target's"
                yield Finding("wrong", text, f"keep {module}, or drop it where the target has it")
            elif module in stored and not pruned:
                text = (
                    f"{engine.title} serves the target's {module} in the place of the draft's own"
                )
                yield Finding("unknown", text, f"compare {module} with the target's")


def _inner(name: str, roots: Iterable[str]) -> str:
    return next((name.removeprefix(root) for root in roots if name.startswith(root)), name)


def _uneven_shards(question: Question) -> Iterator[Finding]:
    """Heads and inner widths that the shards cannot share."""
    tp, heads = question.tp, question.config.get("num_attention_heads", 0)
    if heads % tp and question.own.uneven_heads:
        text = question.own.uneven_heads.format(heads=heads, tp=tp)
        yield Finding("init", text, f"serve the draft on a number of GPUs that divides {heads}")
        return
    fewer = "serve the draft on fewer GPUs"
    kept = question.config.get("num_key_value_heads")
    kept = kept if type(kept) is int and kept > 0 else heads
    if heads % tp:
        yield Finding("init", "AssertionError: assert self.total_num_heads % tp_size == 0", fewer)
    elif max(kept, tp) % min(kept or tp, tp):
        yield Finding(
            "init", "AssertionError: assert self.total_num_kv_heads % tp_size == 0", fewer
        )
    elif (width := question.config.get("intermediate_size", 0)) % tp:
        yield Finding("init", f"AssertionError: {width} is not divisible by {tp}", fewer)


def _other_vocabulary(
    engine: Engine, question: Question, geometry: Any, stored: Stored
) -> Iterator[Finding]:
    vocab = geometry.vocab_size
    embedding = stored.get("embed_tokens", {}).get("weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else vocab
    served = not question.own.shares_tables
    if rows != vocab and served and engine.embedding_rows:
        text = engine.embedding_rows.format(rows=rows, vocab=vocab)
        yield Finding("load", text, f"export the draft with its {vocab} embeddings")


def _later_norms(engine: Engine, question: Question, stored: Stored) -> Iterator[Finding]:
    """EAGLE-3's layers after the first: engines use one of two norms, and build both."""
    wanted = engine.later_norm
    if not question.traits.two_layer_norms or not wanted:
        return
    for i in range(1, question.num_layers):
        norm = stored.get(f"layers.{i}.input_layernorm", {}).get("weight")
        if norm is not None and not norm.name.endswith(f".{wanted}.weight"):
            yield Finding(
                "wrong",
                f"model.layers.{i}.{wanted}.weight stays uninitialised, because the norm is stored"
                f" as {norm.name}",
                f"rename it to {wanted} for {engine.title}",
            )


def strangers(engine: Engine, question: Question, tensor: TensorInfo) -> Iterator[Finding]:
    """A tensor for which there may be no parameter; no engine minds a bias."""
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
        if isinstance(read, Finding):
            yield read
        if read is None:
            text = f"Loading a tensor called {name} was never executed"
            yield Finding("unknown", text, remedy)
        if read is not False:
            return
        remedy = f"remove {name}: without it an FP8 KV cache is served with a scale of 1"
    dropped = name.startswith(question.own.dropped)
    dropped = dropped or question.own.unknown_tensors == "dropped"
    silent = name.endswith((".bias", ".input_zero_point"))
    if silent or (dropped and engine.stranger(question, name) is None):
        text = f"{engine.title} drops {name}, because its model has no parameter for it"
        yield Finding("wrong", text, remedy)
    elif (refused := engine.stranger(question, name)) is not None:
        yield Finding("load", refused, remedy)
    else:
        yield no_such_name(name, remedy)


def _absent_norm(question: Question, name: str) -> Finding:
    if question.own.refuses_absent_norm and question.declaration is None:
        text = f"ValueError: Following weights were not initialized from checkpoint: {name!r}"
        return Finding("load", text, "export the draft again")
    text = f"{name} stays uninitialised, because it is not stored"
    return Finding("wrong", text, "export the draft again")


def no_such_name(name: str, remedy: str) -> Finding:
    """The error of an engine that refuses a tensor for which it has no parameter."""
    loaded = name.replace("midlayer", "layers.0")
    text = f"ValueError: There is no module or parameter named {loaded!r}"
    return Finding("load", text, remedy)


def never_written(module: Module, name: str) -> Finding:
    """A parameter of a module that no stored tensor fills."""
    text = f"{module.name} stays uninitialised, because {name} is not stored"
    return Finding("wrong", text, "the folder is incomplete: quantize or download it again")


def dropped_scales(parts: Mapping[str, Mapping[str, TensorInfo]]) -> Finding:
    """AWQ with one group for the whole row: a shard of the row has no group at all."""
    name = next(t.name for part in parts.values() for t in part.values())
    return Finding(
        "wrong",
        f"The zero points and scales of {name.rpartition('.')[0]} are dropped, because a row that"
        " is split between GPUs has no whole group",
        "quantize with groups of 128, or serve on one GPU",
    )


def not_executed(what: str) -> Finding:
    """A declaration of which nothing is known."""
    text = f"Loading this declaration was never executed: {what}"
    return Finding("unknown", text, "quantize the draft again, by a built-in recipe")
