"""How a declaration says that linears are stored, as engines read it.

An engine takes the keys that it knows, less strictly than this package. What `stored.layouts` does
not decode can be neither verified nor gated, and is UNKNOWN, unless the engine refuses its method.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...recipes.errors import CheckpointError, VerifyError, short
from ..drafts.config_reader import object_at
from ..files.checkpoint import Checkpoint
from ..stored.layouts import LAYOUTS
from ..stored.layouts.declaration_reader import ObjectReader
from ..stored.layouts.scheme import FLOAT_DTYPES, GROUPS, DeclaredScheme, Part, Parts
from ..stored.stored_declaration import Form, RawDeclaration, stored_parts, written_declaration

ANY_FLOAT = (*FLOAT_DTYPES, "F8_E8M0")
_SYMMETRIC = ("awq", True)
NOT_READ = ("weight_shape", "weight_zero_point", "weight_zero_point_2")
"""Suffixes of parts whose absence no engine minds: values are symmetric."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """By what an engine chooses the class of a linear; rows of schemes.toml name these fields.

    Attributes:
        layout: the quant_method that stores it so.
        dtype: of the values. granularity: what has a scale of its own.
        group_size: inputs of a group; 0 = there are none.
        says_symmetric: AWQ declares that values do not count from stored zero points.
        of_fp8: they were rounded to FP8 before.
    """

    layout: str = ""
    dtype: str = ""
    granularity: str = ""
    group_size: int = 0
    activations: str = "none"
    says_symmetric: bool = False
    of_fp8: bool = False

    def __str__(self) -> str:
        names = {
            "declared as symmetric": self.says_symmetric,
            f"{self.granularity}{self.group_size or ''}": self.dtype not in GROUPS,
            "of FP8": self.of_fp8,
        }
        words = [name for name, holds in names.items() if holds]
        return " ".join([self.layout, self.dtype, *words, self.activations])


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScheme:
    """One way to store the linears that its targets name, by module or by class.

    Attributes:
        suffix: last part of the name of the tensor with the values.
    """

    stored: DeclaredScheme
    signature: Signature
    suffix: str

    @classmethod
    def of(cls, stored: DeclaredScheme) -> "LinearScheme":
        """A scheme as engines take it."""
        signature = Signature(
            layout=stored.layout.name,
            dtype=stored.weight_dtype.removesuffix("_e4m3"),
            granularity="ordered" if stored.ordered else stored.granularity,
            group_size=(stored.group_size or 0) if stored.granularity == "group" else 0,
            activations=stored.activations,
            says_symmetric=(stored.layout.name, stored.layout.declares_symmetry) == _SYMMETRIC,
            of_fp8=stored.first_stage is not None,
        )
        suffix = stored.layout.weight_suffix(stored)
        return cls(stored=stored, signature=signature, suffix=suffix)

    def parts(self, rows: int, columns: int) -> Parts:
        """Tensors of a linear; engines copy floats of any dtype into another, powers of two too."""
        return {
            suffix: Part(ANY_FLOAT, part.shape) if {*part.dtypes} <= {*FLOAT_DTYPES} else part
            for suffix, part in stored_parts(self.stored, rows, columns).items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A `quantization_config`, or the hf_quant_config.json where there is none, raw.

    Attributes:
        method: its quant_method; None where the key is missing; an engine may still take it for
            ModelOpt's.
        form: how it is written. algorithm: ModelOpt's quant_algo.
        layout: the quant_method whose rule compares excludes with names; None where it is not
            understood.
        groups: which linears are stored how; empty where it is not understood: `problem` says why.
        exclude_remedy: what to do about excludes where the engine reads none of them.
    """

    method: str | None
    form: Form
    algorithm: str | None
    by_modelopt: bool
    keys: Mapping[str, Any]
    layout: str | None = None
    groups: tuple[LinearScheme, ...] = ()
    excludes: tuple[str, ...] = ()
    problem: str | None = None
    exclude_remedy: str | None = None

    @property
    def cache_dtype(self) -> str | None:
        """An engine's option for a draft's KV cache, as four layouts declare it; None = no FP8."""
        export, scheme = self.keys.get("export"), self.keys.get("kv_cache_scheme")
        named = self.keys.get("kv_cache_quant_algo") == "FP8" or scheme == "static"
        if isinstance(scheme, Mapping):
            named = named or (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        if isinstance(export, Mapping):
            named = named or bool(export.get("kv_cache_group"))
        return "fp8" if named else None

    @property
    def signature(self) -> Signature | None:
        """That of every linear; None where it is not understood or there are several."""
        signatures = {group.signature for group in self.groups}
        return signatures.pop() if len(signatures) == 1 else None


def read_declaration(checkpoint: Checkpoint) -> Declaration | None:
    """What the folder declares; None = nothing. A declaration that is not an object is refused."""
    written = written_declaration(checkpoint)
    if written is None:
        return None
    raw = written.value
    if not isinstance(raw, dict):
        raise CheckpointError(
            written.where,
            f"quantization_config: expected an object with quant_method, got {short(raw)}",
            fix="remove it, or quantize the draft again",
        )
    algorithm, producer = raw.get("quant_algo"), raw.get("producer")
    method = raw.get("quant_method") if written.has_method else None
    return Declaration(
        method=None if method is None else str(method),
        form=written.form,
        algorithm=None if algorithm is None else str(algorithm),
        by_modelopt=isinstance(producer, dict) and producer.get("name") == "modelopt",
        keys=raw,
        **_understood(written, str(method or ("modelopt" if algorithm else ""))),
    )


def _understood(written: RawDeclaration, method: str) -> dict[str, Any]:
    """The declaration as decoded here, whatever other keys it has; or why it is not."""
    layout = LAYOUTS.get(method)
    if layout is None:
        return {}
    if object_at(written.value, "sparsity_config").get("targets"):
        return {"problem": "sparsity_config, which leaves zeros out of what is stored"}
    try:
        keys = ObjectReader(written.value, written.where, written.key, strictness="engine")
        excludes, scheme = layout.excludes(keys), layout.read(keys)
    except VerifyError as exc:
        return {"problem": " ".join(str(exc).split())}
    groups = tuple(map(LinearScheme.of, (scheme, *scheme.others)))
    return {"layout": layout.name, "groups": groups, "excludes": excludes}
