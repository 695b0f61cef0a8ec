"""What the source of an engine's class says of a draft that no family reads, from its rows.

They never say that a draft loads: it is refused, loads but wrong, or is UNKNOWN for a reason.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...recipes.packages import table_beside
from ..drafts.architectures import declared_architecture
from ..drafts.engine_traits import Finding
from ..files.checkpoint import Checkpoint
from .excludes import exact_or_regex

_FACTS: Sequence[Mapping[str, Any]] = table_beside(__file__, "class_facts")["facts"]
_EXECUTED = "compressed-tensors"
"""The method whose excludes were executed."""
_WEIGHT, _FLOATS = ".weight", ("BF16", "F16", "F32")
_CODES = (_WEIGHT, ".weight_packed")


def from_source(checkpoint: Checkpoint, engine: str) -> Sequence[Finding] | None:
    """What the class of a draft does with it; None where no row has its architecture."""
    name, keys = declared_architecture(checkpoint.config) or "", checkpoint.config
    of_engine = (row for row in _FACTS if row["engine"] == engine)
    fitting = (row for row in of_engine if re.search(row["name"], name))
    row = next((row for row in fitting if row.get("key", "architectures") in keys), None)
    if row is None:
        return None
    found = _built_as_floats(checkpoint, row) or _missed_excludes(checkpoint, row)
    text = f"{row['text']}; what it loads of such a folder was not executed"
    return [found or Finding("unknown", text, "try it in the server")]


def _built_as_floats(checkpoint: Checkpoint, row: Mapping[str, Any]) -> Finding | None:
    for module, dtype in _matrices(checkpoint):
        is_plain = "float_modules" in row and re.search(row["float_modules"], module)
        if is_plain and dtype not in _FLOATS:
            return Finding("load", row["float_text"].format(module), f"keep {module} in BF16")
    return None


def _missed_excludes(checkpoint: Checkpoint, row: Mapping[str, Any]) -> Finding | None:
    """Linears stored as floats that the class quantizes, for it calls them something else."""
    declared = checkpoint.config.get("quantization_config")
    if "module" not in row or not isinstance(declared, dict):
        return None
    matrices = list(_matrices(checkpoint))
    codes = {dtype for _, dtype in matrices if dtype not in _FLOATS}
    groups = declared.get("config_groups", {}).values()
    every = all(group.get("targets") == ["Linear"] for group in groups)
    if declared.get("quant_method") != _EXECUTED or not every or len(codes) != 1:
        return None
    missed = []
    for module, dtype in matrices:
        called = re.search(row["on_disk"], module)
        if called and dtype in _FLOATS:
            name = row["module"].format(called[1])
            if not any(exact_or_regex(pattern, name) for pattern in declared.get("ignore", ())):
                missed.append(module)
    if not missed:
        return None
    words = f"{row['text']}: no exclude matches {row['module'].format('')}{missed[0]}"
    remedy = "exclude " + ", ".join(f"re:.*{module.rpartition('.')[2]}$" for module in missed[:2])
    if codes == {"F8_E4M3"}:
        text = f"{words}, whose weights are cast to FP8 under scales that nothing fills"
        return Finding("wrong", text, remedy)
    if codes == {"I32"}:
        text = f"{words}, which has no parameter of the name weight then"
        return Finding("load", text, remedy)
    return Finding("unknown", f"{words}; what it does with that was not executed", remedy)


def _matrices(checkpoint: Checkpoint) -> Iterable[tuple[str, str]]:
    for tensor in checkpoint.tensors.values():
        module, dot, leaf = tensor.name.rpartition(".")
        if dot + leaf in _CODES and len(tensor.shape) == 2:
            yield module, tensor.dtype
