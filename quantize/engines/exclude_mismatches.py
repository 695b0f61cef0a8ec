"""Which linears engines take otherwise than they are stored, for what the excludes say.

Of each engine, its newest known version is asked.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..drafts import read_config
from ..drafts.config_reader import with_text_config
from ..drafts.engine_traits import Finding
from ..files.checkpoint import Checkpoint
from ..stored.declarations import HF_QUANT_CONFIG
from ..stored.parts import quantized_looking
from .contract import EngineName, Module, Question, UnsureError, shown
from .declaration import read_declaration
from .engine import Engine
from .name_patterns import scheme_of
from .registry import newest_engines


def misread_excludes(
    checkpoint: Checkpoint, *, target_layers: int | None
) -> Mapping[EngineName, str]:
    """Linears that vLLM or SGLang take as codes where floats are stored, or the other way round.

    Fused linears with parts of both kinds are left out: no exclude is right for them. Which engine
    has the scheme at all does not matter here.

    Args:
        checkpoint: declares its quantization in the flat form, in a layout that is known here.
        target_layers: decoder layers of the target, after which vLLM numbers the draft's.

    Returns:
        Of each engine that takes some so, the first, and how many more.

    Raises:
        CheckpointError: config.json is not that of a draft.
    """
    family, _ = read_config(checkpoint)
    names = quantized_looking(checkpoint.tensors.values())
    quantized = {family.canonical_name(f"{n}.weight").removesuffix(".weight") for n in names}
    found = {}
    for engine in newest_engines():
        question = _question(engine, checkpoint, target_layers)
        modules = engine.linears.modules(question) if question is not None else ()
        told = [_misread(engine, question, m, quantized) for m in modules if question is not None]
        if wrong := [text for text in told if text is not None]:
            found[engine.name] = wrong[0] + (f", and {len(wrong) - 1} more" if wrong[1:] else "")
    return found


def _question(engine: Engine, checkpoint: Checkpoint, target_layers: int | None) -> Question | None:
    """None where the engine refuses config.json or the declaration, or reads none."""
    config = engine.config.plain(checkpoint.config)
    if isinstance(config, Finding) or engine.config.architecture_problem(config):
        return None
    checkpoint = replace(checkpoint, config=engine.declaration.as_read(config))
    declaration = read_declaration(checkpoint)
    taken = (
        engine.declaration.taken(declaration, engine.archs[0]) if declaration is not None else None
    )
    if taken is None or isinstance(taken, Finding) or not taken.groups:
        return None
    family, geometry = read_config(checkpoint)
    return Question(
        traits=family.engine_traits,
        own=engine.own(family.engine_traits),
        config=with_text_config(checkpoint.config),
        tensor_names=frozenset(checkpoint.tensors),
        declaration=taken,
        has_side_file=(checkpoint.folder / HF_QUANT_CONFIG).is_file(),
        head_rows=None,  # nor on the vocabulary
        num_layers=geometry.num_layers,
        first_layer=target_layers,
        normed_heads=getattr(geometry, "qk_norm", False),
        fuses=getattr(geometry, "fuses", True),
        arch=engine.archs[0],  # no rule for excludes depends on the GPU
        tp=1,
        inside_target=checkpoint.subtree is not None,
    )


def _misread(
    engine: Engine, question: Question, module: Module, quantized: Collection[str]
) -> str | None:
    """How it takes the module, if that is known and not as it is stored."""
    kinds = {part in quantized for part in module.parts}
    if len(kinds) > 1 or module.leaf in engine.linears.plain(question):
        return None
    try:
        excluded = engine.declaration.is_excluded(question, module)
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
