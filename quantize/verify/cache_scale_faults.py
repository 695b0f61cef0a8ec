"""The scales of a KV cache: declared and stored together, one for each layer, and those of the run.

A scale is a number that nothing else in the folder depends on: one that is missing is served as 1.
"""

import re
from collections.abc import Collection, Mapping

import numpy as np

from ..drafts import Draft
from ..files.checkpoint import CONFIG_FILE, PROVENANCE_FILE, Checkpoint
from ..files.provenance import Method
from ..files.safetensors_header import TensorInfo
from ..stored.declarations import DeclaredScheme
from ..stored.decoded_numbers import stored_scalar
from ..stored.kv_cache import cache_problems, cache_tensors
from .verify_report import Fault

_ATTENTION = re.compile(r"(?P<stored>.*self_attn)\.(?:k_proj|kv_a_proj_with_mqa)")
_LAYER = re.compile(r"layers\.(\d+)\.self_attn\.")


def cache_scale_names(draft: Draft, output: Checkpoint) -> Collection[str]:
    """Names of the stored scales of this draft's layers, in any spelling."""
    layers = _layers(draft)
    found = cache_tensors(output, draft.family)
    return [tensor.name for layer, _, tensor in found if layer in layers]


def cache_scale_faults(
    draft: Draft, output: Checkpoint, scheme: DeclaredScheme | None, method: Method | None
) -> list[Fault]:
    """Every layer has its scales, they are positive numbers, and they are those of the run.

    Args:
        method: of the run; None where another tool made the folder, which may leave scales to
            engines, or store them in several spellings and dtypes.
    """
    faults = [
        Fault(where=where, expected=expected, got=got)
        for where, expected, got in cache_problems(output, draft, scheme)
    ]
    declared = scheme.kv_cache if scheme is not None else None
    stored = {
        (layer, part): tensor
        for layer, of, tensor in cache_tensors(output, draft.family)
        for part in of
    }
    if declared is None and stored and (method is not None or scheme is None):
        names = ", ".join(sorted({tensor.name for tensor in stored.values()}))
        where = f"{CONFIG_FILE}: quantization_config"
        faults.append(Fault(where=where, expected=f"a KV cache, for {names}", got="none"))
    layers = _layers(draft)
    wanted = [(layer, part) for layer in sorted(layers) for part in "kv"] if declared else []
    if method is None and not stored:
        wanted = []  # of another tool: engines take 1
    for layer, part in wanted:
        if (layer, part) not in stored:
            where = f"{layers[layer]}: {part}_scale"
            faults.append(Fault(where=where, expected="a scale of the KV cache", got="none"))
    if method is None or faults:
        return faults
    return _of_the_run(layers, stored, output, method)


def _of_the_run(
    layers: Mapping[int, str],
    stored: Mapping[tuple[int, str], TensorInfo],
    output: Checkpoint,
    method: Method,
) -> list[Fault]:
    """Bit for bit, in float32, and 1 where the recipe says so."""
    cache, faults = method.recipe.kv_cache, []
    where = f"{PROVENANCE_FILE}: cache_scales"
    given = dict(method.cache_scales)
    for layer, name in layers.items() if cache is not None else ():
        for part in "kv":
            tensor = stored[layer, part]
            recorded = given.pop(f"{name}.{part}", None)
            if recorded is None:
                faults.append(Fault(where=where, expected=f"one of {name}.{part}", got="none"))
                continue
            wanted = float(np.float32(recorded))
            if cache is not None and cache.scales == "unit":
                wanted = 1.0
            if (tensor.dtype, tensor.numel) != ("F32", 1):
                got = f"{tensor.dtype} {list(tensor.shape)}"
                faults.append(Fault(where=tensor.name, expected="one F32 number", got=got))
            elif (found := stored_scalar(output, tensor)) != wanted:
                expected = f"{wanted:.9g} (that of the run)"
                faults.append(Fault(where=tensor.name, expected=expected, got=f"{found:.9g}"))
    if given:
        faults.append(Fault(where=where, expected="none (recipe)", got=", ".join(sorted(given))))
    return faults


def _layers(draft: Draft) -> dict[int, str]:
    """Number of each layer with attention -> on-disk name of that."""
    found = {}
    for row in draft.rows:
        stored, layer = _ATTENTION.fullmatch(row.module), _LAYER.match(row.canonical)
        if stored is not None and layer is not None:
            found[int(layer[1])] = stored["stored"]
    return found
