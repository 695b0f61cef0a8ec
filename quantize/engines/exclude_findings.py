"""A stored float weight where an engine expects quantized values: an exclude does not match."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace

from ..drafts import read_config
from ..drafts.engine_traits import MLA_DOWN, Finding
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.layouts import HF_QUANT_CONFIG
from ..stored.stored_declaration import COMPANIONS, quantized_looking
from .built_linears import refused_shape
from .contract import EngineName, Module, Question, UnsureError, shown
from .declared_forms import read_declaration
from .engine import Engine
from .engine_rows import said
from .excludes import gptq_by_rules, scheme_of
from .folder_findings import Folder, no_such_name
from .linear_scheme import LinearScheme
from .mtp_linears import GRAFT, GRAFTED, ROUTED, first_prefix, of_other_layer
from .versions import newest_engines


def floats_into_codes(
    folder: Folder,
    module: Module,
    scheme: LinearScheme,
    weight: TensorInfo,
    shape: tuple[int, int],
    *,
    mixed: bool,
) -> Finding:
    """What the engine makes of a float weight of one part, which is to have [rows, columns]."""
    engine, question = folder.engine, folder.question
    own, remedy = question.own, _remedy(engine, question, module, mixed=mixed)
    codes = scheme.parts(*shape).get("weight")
    names = {"engine": engine.title, "weight": weight, "remedy": remedy}
    if scheme.weight_dtype in ("fp8_e4m3", "mxfp8", "int8") and codes is not None:
        if own.floats_into_fp8 == "cast":
            return said("casts-floats", dtype=codes.dtypes[0], **names)
        if mixed and module.leaf in MLA_DOWN.names:
            return said("promotes-floats", remedy=remedy)
        if own.floats_into_fp8 == "refused":
            return said("downcasts-floats", remedy=remedy)
    elif scheme.suffix != "weight":
        if own.unknown_tensors == "refused":
            return no_such_name(weight.name, remedy)
        if refused := engine.stranger(question, weight.name):
            return Finding("load", refused, remedy)
        if own.unknown_tensors == "dropped":
            return said("drops-floats", **names)
    elif module.leaf == "lm_head" and own.unknown_tensors == "dropped":  # FP4, in bytes
        columns = weight.shape[1]
        return said("floats-into-bytes", packed=columns // 2, columns=columns, remedy=remedy)
    elif scheme.weight_dtype == "int4" and own.unknown_tensors == "refused":
        return said("floats-into-words", shape=list(weight.shape), remedy=remedy)
    elif codes is not None and codes.shape != weight.shape and engine.checks_shapes:
        return refused_shape(weight, codes.shape, remedy)
    return said("floats-into-codes", **names)


def _remedy(engine: Engine, question: Question, module: Module, *, mixed: bool) -> str:
    unread = question.declaration and question.declaration.exclude_remedy
    if unread:
        return unread
    if mixed:
        return f"quantize all parts of {module.leaf} or none: they are fused"
    return excluding(engine, question, module)


def excluding(engine: Engine, question: Question, module: Module) -> str:
    """What excludes a module: its own name, or those of its parts, if no other layer has them."""

    def excluded(asked: Module, names: tuple[str, ...]) -> bool:
        declared = question.declaration and replace(question.declaration, excludes=names)
        with suppress(UnsureError):
            answer = engine.is_excluded(replace(question, declaration=declared), asked)
            return answer is True
        return False

    names: tuple[str, ...] = (module.prefix,)
    shared = (twin := of_other_layer(question, module)) == module
    if not excluded(module, ()):  # as by keys of another kind
        names = next((n for n in (names, module.part_prefixes) if excluded(module, n)), names)
        shared = shared or (twin is not None and excluded(twin, names))
    if shared:
        graft = f"{GRAFT}, and " if question.method in GRAFTED else ""
        what = f"{engine.title} knows the layer's linears by names that others of the target have"
        return f"{graft}serve it with another engine: {what}"
    said = ", ".join(map(repr, names))
    return f"exclude {module.leaf} so that {engine.title} matches it as {said}"


# ---- Routed experts of an MTP layer that are stored as floats in a quantized target
# Engines fuse them into one module, which is no linear: excludes mean it by rules of its own.
# Executed: `experiments/engines/inside.py`.


def float_experts(engine: Engine, question: Question) -> Finding | None:
    """What becomes of them; None where there are none, or where they are served as they are."""
    served, declared = question.own.mtp, question.declaration
    names = [n for n in question.tensor_names if ROUTED in n and n.endswith(".weight")]
    codes = any(ROUTED in n and n.rpartition(".")[2] in COMPANIONS for n in question.tensor_names)
    if served is None or not question.inside_target or declared is None or codes or not names:
        return None
    first = first_prefix(question, served)
    single = [f"{first}{n[n.index('mlp.') : -len('.weight')]}" for n in names]
    whole = single[0].partition(ROUTED)[0] + ROUTED.rstrip(".")

    def excluded(name: str) -> bool:
        asked = Module(name, name, (), "column")
        if question.method == "gptq":  # never by lists: `auto_gptq.py:80` of vLLM
            return gptq_by_rules(question, asked)
        return engine.is_excluded(question, asked) is True

    try:
        by_whole, by_single = excluded(whole), set(map(excluded, single))
    except UnsureError as exc:
        return said("unsure-experts", why=str(exc))
    listed = question.method in engine.experts_by_name and set(single) <= set(declared.excludes)
    named = question.method in engine.experts_by_name - {"compressed-tensors"} and by_whole
    if listed or named or (by_whole and by_single == {True}):
        return None
    remedy = excluding(engine, question, Module(whole, whole, (), "column"))
    if remedy.startswith("exclude"):
        remedy = f"exclude each expert of the layer by its name, and {whole!r}"
        remedy += f"; or {GRAFT}" if question.method in GRAFTED else ""
    if question.method not in GRAFTED or by_whole or True in by_single:
        return said("unread-experts", engine=engine.title, whole=whole, remedy=remedy)
    return said("float-experts", engine=engine.title, whole=whole, remedy=remedy)


# ---- Which linears engines take otherwise than they are stored, for what the excludes say
# Of each engine, its newest known version is asked.


def misread_excludes(
    checkpoint: Checkpoint, *, target_layers: int | None
) -> Mapping[EngineName, str]:
    """Linears that an engine takes as quantized where floats are stored, or the other way round.

    Of each such engine the first, and how many more. Fused linears with parts of both kinds are
    left out: no exclude is right for them. Which engine has the scheme at all does not matter here.
    """
    family, _ = read_config(checkpoint)
    names = quantized_looking(checkpoint.tensors.values())
    quantized = {family.canonical_name(f"{n}.weight").removesuffix(".weight") for n in names}
    found = {}
    for engine in newest_engines():
        question = _question(engine, checkpoint, target_layers)
        modules = engine.modules(question) if question is not None else ()
        told = [_misread(engine, question, m, quantized) for m in modules if question is not None]
        if wrong := [text for text in told if text is not None]:
            found[engine.name] = wrong[0] + (f", and {len(wrong) - 1} more" if wrong[1:] else "")
    return found


def _question(engine: Engine, checkpoint: Checkpoint, target_layers: int | None) -> Question | None:
    """None where the engine refuses config.json or the declaration, or reads none."""
    config = engine.plain_config(checkpoint.config)
    if isinstance(config, Finding) or engine.architecture_problem(config):
        return None
    checkpoint = replace(checkpoint, config=engine.as_declared(config))
    declaration = read_declaration(checkpoint)
    taken = engine.taken(declaration, engine.archs[0]) if declaration is not None else None
    if taken is None or isinstance(taken, Finding) or not taken.groups:
        return None
    family, geometry = read_config(checkpoint)
    return engine.question(
        checkpoint,
        family.engine_traits,
        geometry,
        declaration=taken,
        head_rows=None,
        tp=1,
        has_side_file=(checkpoint.folder / HF_QUANT_CONFIG).is_file(),
        first_layer=target_layers,
        arch=engine.archs[0],  # no rule for excludes depends on the GPU
    )


def _misread(
    engine: Engine, question: Question, module: Module, quantized: Collection[str]
) -> str | None:
    """How it takes the module, if that is known and not as it is stored."""
    kinds = {part in quantized for part in module.parts}
    if len(kinds) > 1 or module.leaf in engine.plain(question):
        return None
    try:
        excluded = engine.is_excluded(question, module)
        if not excluded and scheme_of(question, module) is None:
            return None  # no target means it: whatever is excluded
    except UnsureError:
        return None
    if isinstance(excluded, Finding) or excluded not in kinds:
        return None
    taken, stored = "quantized", "floats are stored"
    if excluded:
        taken, stored = "not quantized", "quantized values are stored"
    return f"{engine.title} takes {shown(module.name)} as {taken}, where {stored}"
