"""What verification says of excludes: what is kept is excluded, what is quantized is not.

Engines ask by run-time names: vLLM 0.33 and SGLang 0.5.23 fuse linears, vLLM numbers layers anew.
"""

import re
from collections.abc import Sequence

from ..drafts import Draft, Row
from ..drafts.fused import fused_group, fused_names
from ..files.checkpoint import CONFIG_FILE
from ..stored.declarations import DeclaredScheme
from .verify_report import Fault

_NUMBER = re.compile(r"layers\.(\d+)\.")
_ANY_LAYER = 61  # vLLM numbers a draft's layers after the target's: Kimi-K2 and DeepSeek-V3 have 61


def exclude_faults(
    draft: Draft, scheme: DeclaredScheme, quantized: frozenset[str], *, all_listed: bool = True
) -> list[Fault]:
    """Kept matrices are excluded, quantized ones are not, under each name an engine may ask for.

    Args:
        draft: the source, or the folder's own.
        all_listed: every kept matrix, as this package lists them. Engines ask neither for an
            embedding nor, in most layouts, for a head, and other tools leave these out.
    """
    faults = []
    matrices = [row for row in draft.rows if len(row.tensor.shape) == 2]
    kept = [row for row in matrices if row.module not in quantized]
    root = draft.family.served_root
    first = 0 if root else _first_layer([row for row in kept if _in_layer(row)], scheme)
    for row in matrices:
        module = row.module
        if module in quantized:
            for name in _runtime_names(row, scheme):
                if scheme.is_excluded(name):
                    faults.append(_exclude_fault(scheme, name, "not excluded: it is quantized"))
                    break
        elif all_listed or _is_asked_for(row, scheme):
            base = module.removeprefix("model.")
            # The head stands outside `model` at run time.
            names = {module, base} if row.role == "head" else {module, base, f"model.{base}"}
            names |= {f"{root}{_numbered(row, first)}"} if _in_layer(row) else set()
            for name in sorted(names):
                if not scheme.is_excluded(name):
                    faults.append(_exclude_fault(scheme, name, "excluded: it is kept"))
    return faults


def _is_asked_for(row: Row, scheme: DeclaredScheme) -> bool:
    """An embedding never is: vLLM 0.33 and SGLang 0.5.23 build it without a quantization."""
    if row.role == "head":
        return scheme.asks_for_head(row.module)
    if scheme.layout.lists_layers_only and not _in_layer(row):
        return False
    return row.role != "embedding"


def _runtime_names(row: Row, scheme: DeclaredScheme) -> list[str]:
    """Names under which an engine may ask whether a quantized linear is excluded."""
    canonical = row.canonical.removesuffix(".weight")
    parent, _, leaf = canonical.rpartition(".")
    block = parent.rpartition(".")[2]  # self_attn or mlp
    leaves = [leaf, *fused_names(leaf)]
    names = [row.module, canonical]
    # vLLM numbers the draft's layer after the target's; SGLang drops layer and block.
    numbers = [str(_ANY_LAYER), *_NUMBER.findall(" ".join(scheme.excludes))]
    for part in leaves:
        names += [part, f"{block}.{part}", f"{parent}.{part}"]
        names += [f"layers.{number}.{block}.{part}" for number in numbers]
    return names + [f"model.{name.removeprefix('model.')}" for name in names]


def _numbered(row: Row, first: int) -> str:
    """The name in vLLM of a linear of a decoder layer, where the first layer is number `first`."""
    parent, leaf = fused_group(row.canonical.removesuffix(".weight"))
    _, layer, block = parent.split(".")
    return f"model.layers.{first + int(layer)}.{block}.{leaf}"


def _first_layer(rows: Sequence[Row], scheme: DeclaredScheme) -> int:
    """The number from which excludes count the draft's layers: that under which most are excluded.

    Plain fp8 excludes whole names, so there is one such number; patterns hold for any.
    """
    found = {int(number) for number in _NUMBER.findall(" ".join(scheme.excludes))}
    layers = {int(row.canonical.split(".")[1]) for row in rows}
    firsts = {number - layer for number in found for layer in layers if number > layer}

    def count(first: int) -> tuple[int, int]:
        """Small numbers are those of the names on disk, so they go last."""
        return sum(scheme.is_excluded(_numbered(row, first)) for row in rows), first

    return max(firsts, key=count, default=_ANY_LAYER)


def _exclude_fault(scheme: DeclaredScheme, name: str, expected: str) -> Fault:
    got = f"patterns {list(scheme.excludes)}"
    return Fault(where=f"{CONFIG_FILE}: {name}", expected=expected, got=got)


def _in_layer(row: Row) -> bool:
    return row.canonical.startswith("layers.")
