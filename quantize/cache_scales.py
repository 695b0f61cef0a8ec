"""The scales of a draft's KV cache in an output: planned, checked and written."""

from collections.abc import Mapping, Sequence

from ..recipes.schema import Recipe
from .drafts import Draft
from .drafts.cache_sites import cache_sites
from .drafts.kv_cache import UNIT, CacheScales
from .errors import PASS_TRACES, BackendError
from .files.safetensors_file import SafetensorsFile
from .files.safetensors_header import StoredTensor
from .layouts import get_layout
from .outputs import OutputTensors


def cache_outputs(recipe: Recipe, draft: Draft) -> tuple[OutputTensors, ...]:
    """Of each layer the scale of its keys and that of its values; none where no cache is declared.

    Raises:
        PlanError: engines read no scales of this draft's KV cache.
        CheckpointError: it has no KV cache.
    """
    if recipe.kv_cache is None:
        return ()
    layout = get_layout(recipe.layout)
    found = []
    for site in cache_sites(draft):
        stored = tuple(
            StoredTensor(name=name, dtype="F32", shape=layout.cache_scale_shape)
            for name in site.names(layout.cache_scale_names)
        )
        found.append(OutputTensors(row=site.keys, stored=stored, changed=True))
    return tuple(found)


def checked_cache_scales(
    recipe: Recipe, draft: Draft, scales: Mapping[int, CacheScales]
) -> dict[str, float]:
    """Scales of the KV cache, which are given exactly where the recipe measures them.

    Returns:
        By what draftquant.json calls them, see `Method`.

    Raises:
        BackendError: they are not, or one is not a positive number in float32.
    """
    cache, where = recipe.kv_cache, f"recipe {recipe.name}"
    if cache is None or not cache.needs_traces:
        if scales:
            raise BackendError(
                where,
                f"scales of the KV cache are given, but the recipe's are {cache or 'none'}",
                fix="leave them out, or write kv_cache: {dtype: fp8_e4m3, scales: measured}",
            )
        if cache is None:
            return {}
    sites = cache_sites(draft)
    missing = [site.layer for site in sites if site.layer not in scales]
    if cache.needs_traces and missing:
        raise BackendError(
            where,
            f"kv_cache is {cache}, so each layer needs one of its keys and one of its values."
            f" Missing: {', '.join(map(str, missing))}",
            fix=f"{PASS_TRACES}. Or take the scales that need no traces (--kv-cache unit)",
        )
    import numpy as np

    found: dict[str, float] = {}
    for site in sites:
        each = scales.get(site.layer, UNIT)
        for name, values in zip(site.recorded, (each.k, each.v), strict=True):
            if len(values) != 1 or not 0 < float(np.float32(values[0])) < float("inf"):
                raise BackendError(
                    f"{where}: {name}",
                    f"expected one positive scale of the KV cache, got {list(values)}",
                    fix="measure it again, on traces in which the draft computes finite numbers",
                )
            found[name] = float(np.float32(values[0]))
    return found


def store_cache_scales(
    outputs: Sequence[OutputTensors],
    files: Mapping[str, SafetensorsFile],
    scales: Mapping[str, float],
) -> None:
    """Write the scales of the KV cache.

    Args:
        outputs: from `cache_outputs`.
        files: being written, by name.
        scales: from `checked_cache_scales`, in the same order.
    """
    import torch

    stored = [(output.row.tensor.file, each) for output in outputs for each in output.stored]
    for (file, tensor), scale in zip(stored, scales.values(), strict=True):
        value = torch.full(tensor.shape, scale, dtype=torch.float32)
        files[file].write(tensor.name, value)
