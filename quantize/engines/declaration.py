"""What a folder declares, as engines read it: raw, so that no declaration is an error here.

`quantize.declared` understands a declaration or rejects it. An engine does neither: it takes the
keys that it knows. So a declaration that the strict reader rejects has no scheme here, and a
verdict of UNKNOWN, unless the engine refuses it by its quant_method.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint import CONFIG_FILE, Checkpoint, read_json_object
from ..declared import (
    HF_QUANT_CONFIG,
    DeclaredScheme,
    awq,
    compressed_tensors,
    fp8,
    modelopt,
    quark,
)
from ..declared.reader import ObjectReader
from ..errors import CheckpointError, VerifyError

_READERS: Mapping[str, Callable[[ObjectReader], DeclaredScheme]] = {
    "quark": quark.read,
    "compressed-tensors": compressed_tensors.read,
    "modelopt": modelopt.read,
    "fp8": fp8.read,
    "awq": awq.read,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A `quantization_config`, or the hf_quant_config.json where there is none.

    Attributes:
        method: its quant_method as written; None where the key is missing.
        scheme: None where it is not understood; `problem` says why.
        lists_excludes: whether it has a list of excludes at all.
    """

    method: str | None
    scheme: DeclaredScheme | None
    problem: str | None
    lists_excludes: bool

    @property
    def signature(self) -> str | None:
        """The scheme as a key of the engines' tables, such as "quark int4 group128 none"."""
        if self.scheme is None:
            return None
        s = self.scheme
        parts = [s.layout, s.weight_dtype.removesuffix("_e4m3")]
        if s.weight_dtype in ("int4", "fp8_e4m3"):
            size = s.group_size if s.granularity == "group" else None
            parts.append(f"{s.granularity}{size or ''}")
        return " ".join([*parts, s.activations])


def read_declaration(checkpoint: Checkpoint) -> Declaration | None:
    """What the folder declares; None = nothing.

    Both engines read config.json, and hf_quant_config.json only where it declares nothing
    (executed with vLLM 0.33 and SGLang 0.5.23).

    Raises:
        CheckpointError: hf_quant_config.json is not readable as JSON, or quantization_config is no
            object that says anything.
    """
    raw = checkpoint.config.get("quantization_config")
    where = checkpoint.folder / CONFIG_FILE
    side_file = checkpoint.folder / HF_QUANT_CONFIG
    if raw is None:
        if not side_file.is_file():
            return None
        raw, where = _flattened(read_json_object(side_file, "export it again")), side_file
    if not isinstance(raw, dict) or not raw:
        raise CheckpointError(
            where,
            f"quantization_config: expected an object with quant_method, got {raw!r}",
            fix="remove it, or quantize the draft again",
        )
    method = raw.get("quant_method")
    lists = any(raw.get(key) for key in ("exclude", "ignore", "modules_to_not_convert"))
    try:
        scheme, problem = _read(raw, method, where), None
    except VerifyError as exc:
        scheme, problem = None, " ".join(str(exc).split())
    return Declaration(
        method=None if method is None else str(method),
        scheme=scheme,
        problem=problem,
        lists_excludes=lists,
    )


def _flattened(side: dict[str, Any]) -> dict[str, Any]:
    """The nested form of ModelOpt's own file as its flat form in config.json."""
    nested = side.get("quantization")
    return {"quant_method": "modelopt", **(nested if isinstance(nested, dict) else {})}


def _read(raw: dict[str, Any], method: object, where: object) -> DeclaredScheme | None:
    if not isinstance(method, str) or method not in _READERS:
        return None
    ignored = ("quant_method", "producer", "version", "quant_mode", "global_compression_ratio")
    per_row = method == "awq" and raw.get("group_size") == -1  # one group for the whole row
    if per_row:
        raw = {**raw, "group_size": 128}
    keys = ObjectReader.of(raw, where, "quantization_config", ignored=ignored)
    scheme = _READERS[method](keys)
    keys.finish()
    return replace(scheme, granularity="channel", group_size=None) if per_row else scheme
