"""Where a folder declares its quantization, and ModelOpt's nested form spelled as its flat one.

ModelOpt 0.47 writes hf_quant_config.json, `{"producer": ..., "quantization": {"quant_algo": ...}}`;
its exporter of drafts puts the same object into config.json, without quant_method.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...files.checkpoint import CONFIG_FILE, Checkpoint, read_json_object
from ...files.files_of_folder import check_own
from ..layouts import HF_QUANT_CONFIG
from ..parts import quantized_looking

_DECLARATION, _NESTED = "quantization_config", "quantization"
_OF_NO_SCHEME = ("quant_method", "producer", "version", "exclude_modules", "ignore", "group_size")
Form = Literal["flat", "nested", "side file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawDeclaration:
    """A declaration as JSON, before anybody understands it.

    Attributes:
        value: the `quantization_config`; of the nested form, outer and inner keys together.
        where: the file.
        key: path of the object inside the file.
        form: "nested": in config.json; "side file": the same in hf_quant_config.json alone.
        has_method: it names a quant_method; the value of a nested one always has "modelopt".
    """

    value: Any
    where: Path
    key: str
    form: Form
    has_method: bool

    @property
    def is_empty(self) -> bool:
        """Whether it names no scheme: ModelOpt writes a null quant_algo beside a BF16 draft.

        MLX's {group_size, bits, mode} says how tensors are packed, not which.
        """
        said = self.value if isinstance(self.value, dict) else {"": True}
        if not self.has_method and {"group_size", "bits"} <= said.keys():
            return True
        named = any(value for key, value in said.items() if key not in _OF_NO_SCHEME)
        return not named and str(said.get("quant_method") or "modelopt").startswith("modelopt")


def raw_declaration(checkpoint: Checkpoint) -> RawDeclaration | None:
    """What a folder declares; None = nothing, also by an empty declaration beside a BF16 draft.

    Raises:
        CheckpointError: hf_quant_config.json is not readable as JSON.
    """
    found = written_declaration(checkpoint)
    if found is None or not found.is_empty or quantized_looking(checkpoint.tensors.values()):
        return found
    return None


def written_declaration(checkpoint: Checkpoint) -> RawDeclaration | None:
    """The declaration that engines look at, empty or not; None = there is none.

    Engines read config.json, and hf_quant_config.json only where it declares nothing (executed with
    vLLM 0.33 and SGLang 0.5.23).

    Raises:
        CheckpointError: hf_quant_config.json is not readable as JSON.
    """
    declared = checkpoint.config.get(_DECLARATION)
    where, key = checkpoint.folder / CONFIG_FILE, _DECLARATION
    form: Form = "nested"
    if declared is None:
        where, key, form = checkpoint.folder / HF_QUANT_CONFIG, "", "side file"
        check_own(checkpoint.folder, HF_QUANT_CONFIG)
        if not where.exists():
            return None
        declared = read_json_object(where, "export it again")
    named = isinstance(declared, dict) and declared.get("quant_method") is not None
    flat = _flattened(declared)
    if flat is not None:
        key = f"{key}.{_NESTED}".lstrip(".")
    elif form == "nested":
        form, flat = "flat", declared
    else:
        flat = {"quant_method": "modelopt", **declared}  # which no reader understands
    return RawDeclaration(value=flat, where=where, key=key, form=form, has_method=named)


def _flattened(declared: object) -> dict[str, Any] | None:
    """The nested form as a flat one; None where it is none, or says something twice."""
    inner = declared.get(_NESTED) if isinstance(declared, dict) else None
    if not isinstance(declared, dict) or not isinstance(inner, dict):
        return None
    outer = {key: value for key, value in declared.items() if key != _NESTED}
    if outer.keys() & inner.keys():
        return None
    return {"quant_method": "modelopt", **outer, **inner}
