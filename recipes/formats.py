"""Number formats: the facts that schema, layouts and readers ask for; both sides share no code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

WeightDtype = Literal["int4", "int8", "fp8_e4m3", "nvfp4", "mxfp4"]
ActivationDtype = Literal["fp8_e4m3", "nvfp4", "mxfp4"]
"""Formats that the input of a linear may be rounded to."""
KvCacheDtype = Literal["fp8_e4m3"]
FP8_CACHE: KvCacheDtype = "fp8_e4m3"
KvCacheChoice = Literal["auto", "fp8_e4m3"]
"""As the options of engines spell them; auto = what a folder declares."""
GroupedActivations = Literal["nvfp4", "mxfp4"]
"""Those that have only group scales: a declaration names them by their groups."""
Precision = Literal["bf16", "fp8", "nvfp4", "mxfp4", "mxfp4_fp8"]
"""What a matrix multiplication of a GPU takes; bf16 stands for both 16-bit formats."""
OnlineHead = Literal["fp8", "nvfp4"]
"""What vLLM 0.33 can turn a draft's head into while loading (`draft_lm_head_quantization`)."""
Granularity = Literal["channel", "tensor", "group", "block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """What the codes and scales of one format look like, in any layout.

    Attributes:
        largest: the largest positive code.
        sizes: granularity -> group sizes; none where a scale covers a whole row or matrix.
        stored_dtype: safetensors dtype of the elements into which codes are packed, along a row.
        scale_dtype: safetensors dtype; "U8" holds an exponent (E8M0), None means the dtype of the
            weight or the one that a recipe says.
        global_scale: one scale for the whole matrix multiplies those of the groups.
        unit: the format that GPUs with a unit for it multiply; "bf16" = it is always widened.
        carried: granularities whose codes a wider format holds exactly: -8 .. 7 in FP8 E4M3.
        second_stage: granularities whose codes may be taken from a weight rounded to FP8 first.
    """

    bits: int
    kind: Literal["int", "float"]
    largest: float
    sizes: Mapping[Granularity, tuple[int, ...]]
    stored_dtype: str
    codes_per_element: int
    scale_dtype: str | None
    global_scale: bool = False
    unit: Precision = "bf16"
    carried: tuple[Granularity, ...] = ()
    second_stage: tuple[Granularity, ...] = ()

    @property
    def only_groups(self) -> bool:
        """True if it is defined by its groups, as FP4 is."""
        return set(self.sizes) == {"group"}

    @property
    def is_integer(self) -> bool:
        """True if a code is a whole number."""
        return self.kind == "int"

    @property
    def is_fp8(self) -> bool:
        """True for floating-point numbers of 8 bits."""
        return self.kind == "float" and self.bits == 8

    @property
    def powers_of_two(self) -> bool:
        """True if its scales are powers of two, stored as exponents."""
        return self.scale_dtype == "U8"

    @property
    def is_fp4(self) -> bool:
        """True for floating-point numbers of 4 bits."""
        return self.kind == "float" and self.bits == 4


NUMBER_FORMATS: Mapping[WeightDtype, NumberFormat] = {
    "int4": NumberFormat(
        bits=4, kind="int", largest=7, sizes={"channel": (), "group": (32, 64, 128)},
        stored_dtype="I32", codes_per_element=8, scale_dtype=None,
        carried=("channel",), second_stage=("channel",),
    ),
    "int8": NumberFormat(
        bits=8, kind="int", largest=127, sizes={"channel": (), "group": (32, 64, 128)},
        stored_dtype="I32", codes_per_element=4, scale_dtype=None,
    ),
    "fp8_e4m3": NumberFormat(
        bits=8, kind="float", largest=448, sizes={"channel": (), "tensor": (), "block": (128,)},
        stored_dtype="F8_E4M3", codes_per_element=1, scale_dtype="F32", unit="fp8",
    ),
    "nvfp4": NumberFormat(
        bits=4, kind="float", largest=6, sizes={"group": (16,)}, stored_dtype="U8",
        codes_per_element=2, scale_dtype="F8_E4M3", global_scale=True, unit="nvfp4",
    ),
    "mxfp4": NumberFormat(
        bits=4, kind="float", largest=6, sizes={"group": (32,)}, stored_dtype="U8",
        codes_per_element=2, scale_dtype="U8", unit="mxfp4",
    ),
}  # fmt: skip
FEW_BITS: tuple[WeightDtype, ...] = tuple(
    name for name, number in NUMBER_FORMATS.items() if number.bits < 8
)
"""Formats that lose so much that searching their codes along the inputs pays."""


KvCacheScales = Literal["unit", "absmax", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheFormat:
    """How the draft's keys and values are rounded when they enter its cache: x ≈ code * scale.

    Attributes:
        scales: unit: 1.0, which engines use where a folder has none; values beyond FP8 are clipped;
            absmax: the largest magnitude along traces fits; measured: the smallest error along
                them.
    """

    dtype: KvCacheDtype
    scales: KvCacheScales

    @property
    def needs_traces(self) -> bool:
        """True if scales are found along recorded traces."""
        return self.scales != "unit"

    def __str__(self) -> str:
        return f"{self.dtype}, {self.scales} scales"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedForm:
    """Options of an engine that turn a folder into another draft (vLLM: those of the head)."""

    online_head: OnlineHead | None = None
    kv_cache: KvCacheDtype | None = None

    @property
    def changes(self) -> bool:
        """True if what is served is not what the folder alone says."""
        return self != AS_STORED

    def label(self, name: str) -> str:
        """The name of a draft in reports: served in another form, it is another draft."""
        if self.online_head is not None:
            name = f"{name}, head {self.online_head} online"
        if self.kv_cache is not None:
            name = f"{name}, KV cache {self.kv_cache}"
        return name


AS_STORED = ServedForm()


def served_form(head_online: OnlineHead | None, kv_cache_dtype: KvCacheChoice) -> ServedForm:
    """The form that an engine's options turn a folder into."""
    kv_cache = None if kv_cache_dtype == "auto" else kv_cache_dtype
    return ServedForm(online_head=head_online, kv_cache=kv_cache)
