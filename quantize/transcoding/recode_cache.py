"""The scales of a KV cache in another layout: the same numbers, under the names that it has."""

from collections.abc import Mapping
from typing import NamedTuple

from ...recipes.kv_cache import KvCacheFormat
from ...recipes.schema import Recipe
from ..cache_scales import cache_outputs, store_cache_scales
from ..drafts.cache_sites import cache_sites
from ..drafts.kv_cache import UNIT
from ..errors import LayoutError
from ..files.safetensors_file import SafetensorsFile
from ..outputs import OutputTensors
from ..stored.kv_cache import cache_scales
from ..stored.stored_draft import StoredDraft


def declared_cache(stored: StoredDraft) -> KvCacheFormat | None:
    """The KV cache of a folder that another tool made, as a recipe says it."""
    scheme = stored.scheme
    if scheme is None or scheme.kv_cache is None:
        return None
    return KvCacheFormat(dtype=scheme.kv_cache, scales="measured")


class RecodedCache(NamedTuple):
    """The scales of an output: its tensors, see `cache_outputs`, and their numbers by name."""

    outputs: tuple[OutputTensors, ...]
    scales: Mapping[str, float]

    def write(self, output: OutputTensors, file: SafetensorsFile) -> None:
        """Write those of one layer."""
        scales = {tensor.name: self.scales[tensor.name] for tensor in output.stored}
        store_cache_scales((output,), {output.row.tensor.file: file}, scales)


def recoded_cache(source: StoredDraft, recipe: Recipe) -> RecodedCache:
    """The scales of a folder as a recipe's layout stores them; none where it declares no cache.

    Raises:
        PlanError: engines read none of such a draft.
        LayoutError: a layer has one for each head.
        CheckpointError: one is not a positive number.
    """
    outputs = cache_outputs(recipe, source.draft)
    if not outputs:
        return RecodedCache((), {})
    found = cache_scales(source.checkpoint, source.draft, source.scheme)
    names = [tensor.name for output in outputs for tensor in output.stored]
    scales = []
    for site in cache_sites(source.draft):
        own = found.get(site.layer, UNIT)
        for values in (own.k, own.v):
            if len(values) != 1:
                raise LayoutError(
                    source.checkpoint.folder,
                    f"layer {site.layer} has {len(values)} scales of its keys or values, one for"
                    " each head, and other layouts store one",
                    fix="export the draft with one scale per layer (strategy: tensor)",
                )
            scales.append(values[0])
    return RecodedCache(outputs, dict(zip(names, scales, strict=True)))
