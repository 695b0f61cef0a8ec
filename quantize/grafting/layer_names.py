"""The names under which a grafted layer's linears are asked for: on disk, and by each engine.

A declaration of the whole target names them. What it says of the layer must mean no other linear,
so every pattern begins with one of these names' beginnings.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..drafts import Family
from ..drafts.architectures import declared_architecture
from ..drafts.config_reader import with_text_config
from ..drafts.engine_traits import MtpLayer
from ..drafts.fused import fused_names

ENGINES: tuple[Literal["vllm", "sglang"], ...] = ("vllm", "sglang")
_BLOCKS = ("self_attn", "mlp")
"""What a layer's names begin with where an engine gives it no name: SGLang of MiMo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Beginnings of names, without the dot behind them.

    Attributes:
        on_disk: of the layer's modules in the checkpoint.
        engines: engine -> of its linears there; None where they are those of a layer of the target.
    """

    on_disk: tuple[str, ...]
    engines: Mapping[str, tuple[str, ...] | None]

    @property
    def beginnings(self) -> tuple[str, ...]:
        """All of them, each once, sorted."""
        known = (names or () for names in self.engines.values())
        return tuple(sorted({*self.on_disk, *(name for names in known for name in names)}))

    @property
    def pattern(self) -> str:
        """A regular expression, from the start of a name, for everything in the layer."""
        return f"(?:{'|'.join(map(re.escape, self.beginnings))})\\."

    def contains(self, name: str) -> bool:
        """Whether a module of this name is in the layer, however it is called."""
        return any(name == start or name.startswith(f"{start}.") for start in self.beginnings)

    def relative(self, module: str) -> str:
        """The path of a module on disk within the layer."""
        for start in self.on_disk:
            if module.startswith(f"{start}."):
                return module[len(start) + 1 :]
        return module

    def within_layer(self, module: str) -> str:
        """The same, where engines number the layer within what lies below its beginning (Qwen)."""
        return self.relative(module).removeprefix("layers.0.")

    def everywhere(self, module: str) -> tuple[str, ...]:
        """Every name that a module on disk is asked for by, alone or fused."""
        path = self.within_layer(module)
        found = [module]
        for names in self.engines.values():
            found += [_joined(start, path) for start in names or ()]
        return tuple(dict.fromkeys([*found, *(f for name in found for f in fused_names(name))]))


def _joined(start: str, path: str) -> str:
    return path if start in _BLOCKS else f"{start}.{path}"


def layer_names(
    family: Family,
    prefixes: Collection[str],
    config: Mapping[str, object],
    target_modules: Iterable[str],
) -> LayerNames:
    """Of the MTP layers below some prefixes of a target.
    """
    modules = tuple(target_modules)
    traits = {"vllm": family.engine_traits.vllm.mtp, "sglang": family.engine_traits.sglang.mtp}
    engines = {}
    for engine, served in traits.items():
        names = _beginnings(served, config, len(prefixes)) if served else ()
        taken = any(name.startswith(f"{start}.") for start in names for name in modules)
        engines[engine] = None if taken else names
    return LayerNames(on_disk=tuple(sorted(prefixes)), engines=engines)


def _beginnings(served: MtpLayer, config: Mapping[str, object], count: int) -> tuple[str, ...]:
    layers = with_text_config(config).get("num_hidden_layers", 0)
    first = layers if isinstance(layers, int) else 0
    prefix = served.prefixes.get(declared_architecture(config), served.prefix)
    if not prefix:
        return _BLOCKS
    return tuple(dict.fromkeys(prefix.format(n=first + i).rstrip(".") for i in range(count)))
