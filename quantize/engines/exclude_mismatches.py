"""Which linears engines take otherwise than they are stored, for what the excludes say.

Of each engine, its newest known version is asked.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..drafts import read_config
from ..drafts.architectures import declared_architecture
from ..drafts.config_reader import with_text_config
from ..drafts.engine_traits import Finding
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..stored.declarations import HF_QUANT_CONFIG
from ..stored.parts import quantized_looking
from ..verify.verify_report import Fault
from .contract import Module, Question, UnsureError, shown
from .declaration import read_declaration
from .engine import Engine
from .name_patterns import scheme_of
from .registry import newest_engines


class Misread(NamedTuple):
    """One linear of one engine; `as_floats` is how the engine takes it, None = that is unknown."""

    engine: Engine
    module: str
    as_floats: bool | None

    def __str__(self) -> str:
        if self.as_floats is None:
            return f"how {self.engine.title} takes {shown(self.module)} is not known"
        taken, stored = "not quantized", "quantized values are stored"
        if not self.as_floats:
            taken, stored = "quantized", "floats are stored"
        return f"{self.engine.title} takes {shown(self.module)} as {taken}, where {stored}"


def misread_excludes(checkpoint: Checkpoint, *, target_layers: int | None) -> tuple[Misread, ...]:
    """Linears that vLLM or SGLang take as codes where floats are stored, or the other way round.

    Fused linears with parts of both kinds are left out: no exclude is right for them. Which engine
    has the scheme at all does not matter here.

    Args:
        checkpoint: declares its quantization in the flat form, in a layout that is known here.
        target_layers: decoder layers of the target, after which vLLM numbers the draft's.

    Raises:
        CheckpointError: config.json is not that of a draft.
    """
    family, _ = read_config(checkpoint)
    names = quantized_looking(checkpoint.tensors.values())
    quantized = {family.canonical_name(f"{n}.weight").removesuffix(".weight") for n in names}
    return tuple(
        found
        for engine in newest_engines()
        if (question := _question(engine, checkpoint, target_layers)) is not None
        for module in engine.linears.modules(question)
        for found in _misread(engine, question, module, quantized)
    )


def layer_faults(layer: Checkpoint) -> Iterator[Fault]:
    """One for each engine that takes linears of a layer inside its target in another way.

    Names of the layer's excludes are those of the engines, which `verify` does not know.
    """
    found = [
        each for each in misread_excludes(layer, target_layers=None) if each.as_floats is not None
    ]
    for engine in dict.fromkeys(each.engine.title for each in found):
        yield Fault(
            where=f"{CONFIG_FILE}: quantization_config",
            expected="every linear of the layer as it is stored",
            got=listed([each for each in found if each.engine.title == engine]),
        )


def listed(found: Sequence[Misread]) -> str:
    """The first, and how many more."""
    return f"{found[0]}{f', and {len(found) - 1} more' if found[1:] else ''}"


def _question(engine: Engine, checkpoint: Checkpoint, target_layers: int | None) -> Question | None:
    """None where the engine refuses config.json or the declaration, or reads none."""
    config = engine.config.plain(checkpoint.config)
    if isinstance(config, Finding) or engine.config.architecture_problem(
        declared_architecture(config)
    ):
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
) -> Iterator[Misread]:
    kinds = {part in quantized for part in module.parts}
    if len(kinds) > 1 or module.leaf in engine.linears.plain(question):
        return
    try:
        excluded = engine.declaration.is_excluded(question, module)
        if not excluded and scheme_of(question, module) is None:
            return  # no target means it: whatever is excluded
    except UnsureError:
        yield Misread(engine, module.name, None)
        return
    if isinstance(excluded, Finding) or excluded in kinds:
        as_floats = None if isinstance(excluded, Finding) else excluded
        yield Misread(engine, module.name, as_floats)
