"""The KV cache of a draft: in which format an engine holds it, and where its scales come from."""

from dataclasses import dataclass
from typing import Literal

from .formats import KvCacheDtype

KvCacheScales = Literal["unit", "absmax", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheFormat:
    """How the draft's keys and values are rounded when they enter its cache: x ≈ code * scale.

    A layer has one scale of its keys and one of its values, which are stored in the folder. The
    weights and inputs of linears have nothing to do with them.

    Attributes:
        scales: unit: 1.0, which is what engines take where a folder has none, so that whatever
            exceeds FP8's largest number is cut off; absmax: the largest magnitude along recorded
            traces fits; measured: what leaves the smallest error along these traces.
    """

    dtype: KvCacheDtype
    scales: KvCacheScales

    @property
    def needs_traces(self) -> bool:
        """True if scales are found along recorded traces."""
        return self.scales != "unit"

    def __str__(self) -> str:
        return f"{self.dtype}, {self.scales} scales"
