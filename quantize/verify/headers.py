"""What verification says from headers, configs and small values, without comparing tensor data."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...recipes.roles import QUANTIZABLE
from ..drafts import Draft, Row
from ..errors import CheckpointError
from ..files.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint
from ..files.not_a_draft import mistaken_folder, without_safetensors
from ..files.safetensors_header import TensorInfo
from ..stored.declarations import DeclaredScheme
from ..stored.decoded_numbers import stored_scalar
from ..stored.parts import INPUT_SCALES, Part, beside_codes, quantized_looking, stored_parts
from .demands import Demand
from .method import own_parts
from .verify_report import Fault

_PYTORCH = repr("pt")  # what transformers demands as "format", and most exporters write
_ONE_FOR_FUSED = (*INPUT_SCALES, "weight_scale_2", "weight_global_scale")


def check_is_checkpoint(output: Path, config_file: str) -> None:
    """There is a folder to verify.

    Raises:
        CheckpointError: config.json or weights are absent.
    """
    has_weights = (output / INDEX_FILE).exists() or any(output.glob("*.safetensors"))
    has_config = (output / config_file).is_file()
    if not has_config or not has_weights:
        mistake = without_safetensors(output) if has_config else mistaken_folder(output)
        nothing = f"it holds no {CONFIG_FILE}, or no safetensors files"
        what, fix = mistake or (nothing, "give the output folder of `draftquant quantize`")
        raise CheckpointError(output, what, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorting:
    """Which tensors are to be compared, and how; what is wrong by header is a fault instead.

    Attributes:
        kept: same name, dtype and shape on both sides.
        linears: quantized linears whose codes can be decoded, with their stored tensors by suffix.
        complete: on-disk names of those linears that have every tensor that is declared.
        quantized: on-disk names of all modules that look quantized, complete or not.
    """

    kept: tuple[Row, ...]
    linears: tuple[tuple[Row, Mapping[str, TensorInfo]], ...]
    complete: frozenset[str]
    quantized: frozenset[str]
    faults: tuple[Fault, ...]


def sort_tensors(
    draft: Draft,
    output: Checkpoint,
    demands: Mapping[str, Demand],
    beside: Collection[str] = (),
) -> Sorting:
    """Hold every tensor of the source against the header of the output, and the other way round.

    Args:
        draft: the source, without what the recipe drops.
        demands: of the matrices of the source. Where there is no recipe, something else may have
            stored INT4 scales in another dtype.
    """
    modules = quantized_looking(output.tensors.values())
    kept, linears, quantized, complete = [], [], set(), set()
    faults: list[Fault] = []
    claimed: set[str] = set(beside)
    for row in draft.rows:
        module = row.module
        if module not in modules:
            claimed.add(row.tensor.name)
            problem = _not_kept(row.tensor, output.tensors.get(row.tensor.name))
            if problem is None:
                kept.append(row)
            else:
                faults.append(problem)
            continue
        quantized.add(module)
        demand = demands.get(module)
        scheme = demand.scheme if demand else None
        if demand is None or scheme is None or row.role not in QUANTIZABLE:
            claimed |= {n for n in output.tensors if n.rpartition(".")[0] == module}
            faults.append(must_not_be_quantized(module, row))
            continue
        recipe = demand.recipe
        rows, columns = row.tensor.shape
        wide = scheme.layout.foreign_scale_dtypes if recipe is None else ()
        parts = stored_parts(scheme, rows, columns, source_dtypes=(row.tensor.dtype, *wide))
        if recipe is not None:
            scales = demand.origin.scale_dtype or row.tensor.dtype
            parts = own_parts(parts, recipe.weights.stored, scheme, scales)
        claimed |= {f"{module}.{suffix}" for suffix in parts}
        found = {suffix: output.tensors.get(f"{module}.{suffix}") for suffix in parts}
        wrong = wrong_parts(module, parts, found, scheme)
        faults += wrong
        absent = {fault.where.rpartition(".")[2] for fault in wrong}
        if not absent:
            complete.add(module)
        if absent <= beside_codes(scheme):
            linears.append((row, {s: t for s, t in found.items() if t and s not in absent}))
    for name in sorted(output.tensors.keys() - claimed):
        faults.append(Fault(where=name, expected="no such tensor", got=form(output.tensors[name])))
    return Sorting(
        kept=tuple(kept),
        linears=tuple(linears),
        complete=frozenset(complete),
        quantized=frozenset(quantized),
        faults=tuple(faults),
    )


def fused_faults(
    draft: Draft,
    output: Checkpoint,
    scheme: DeclaredScheme | None,
    quantized: frozenset[str],
    complete: frozenset[str],
) -> list[Fault]:
    """Linears that engines fuse are quantized together, and share what engines take only once.

    Args:
        quantized: see `Sorting`.
        complete: see `Sorting`.
    """
    faults = []
    for group in draft.fused_groups():
        members = [module for module in group if module in quantized]
        if members and len(members) < len(group):
            left = ", ".join(module for module in group if module not in quantized)
            expected = "all or none of them quantized"
            faults.append(Fault(where=", ".join(group), expected=expected, got=f"kept: {left}"))
        formats = [scheme.of(module) for module in members] if scheme else []
        if len(dict.fromkeys(map(str, formats))) > 1:
            got = "; ".join(map(str, formats))
            expected = "one format for fused linears"
            faults.append(Fault(where=", ".join(members), expected=expected, got=got))
        for suffix in _ONE_FOR_FUSED:
            names = [f"{module}.{suffix}" for module in group if module in complete]
            stored = [output.tensors[name] for name in names if name in output.tensors]
            scales = {t.name: stored_scalar(output, t) for t in stored if t.numel == 1}
            if len(set(scales.values())) > 1:
                expected, got = f"one {suffix} for fused linears", str(list(scales.values()))
                faults.append(Fault(where=", ".join(scales), expected=expected, got=got))
    return faults


def side_declaration_faults(output: Checkpoint, scheme: DeclaredScheme | None) -> list[Fault]:
    """Some layouts have a second file for what they declare."""
    side_file = scheme.layout.side_file if scheme else None
    if side_file and not (output.folder / side_file.name).is_file():
        return [Fault(where=side_file.name, expected=side_file.what, got="none")]
    return []


def index_faults(output: Checkpoint) -> list[Fault]:
    """metadata.total_size of the index; its weight_map is checked on opening."""
    if output.index is None:
        return []
    metadata = output.index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if type(total) is int and total == output.nbytes:
        return []
    return [Fault(where=f"{INDEX_FILE}: metadata.total_size", expected=str(output.nbytes),
                  got=repr(total))]  # fmt: skip


def metadata_faults(
    source: Checkpoint, output: Checkpoint, *, foreign: bool = False
) -> list[Fault]:
    """The safetensors `__metadata__` is the source's; other tools may say whose tensors these are.
    """
    stored, wanted = _metadata(output), _metadata(source)
    if foreign and stored.get("format", _PYTORCH) == _PYTORCH:
        stored.pop("format", None)
        wanted.pop("format", None)
    return [
        Fault(where=f"__metadata__: {key}", expected=wanted.get(key, "no such key"),
              got=stored.get(key, "no such key"))
        for key in sorted(wanted.keys() | stored.keys())
        if wanted.get(key) != stored.get(key)
    ]  # fmt: skip


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """Key -> what the files say, as text."""
    found: dict[str, set[str]] = {}
    for header in checkpoint.headers.values():
        for key, value in header.metadata.items():
            found.setdefault(key, set()).add(value)
    return {key: " and ".join(map(repr, sorted(values))) for key, values in found.items()}


def _not_kept(tensor: TensorInfo, stored: TensorInfo | None) -> Fault | None:
    if stored is None:
        return Fault(where=tensor.name, expected=form(tensor), got="none")
    if (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
        return Fault(where=tensor.name, expected=f"{form(tensor)} (kept)", got=form(stored))
    return None


def must_not_be_quantized(module: str, row: Row) -> Fault:
    """The fault of a row that is stored as codes but has no business to be."""
    reason = f"{CONFIG_FILE} declares no quantization"
    if row.role not in QUANTIZABLE:
        reason = f"{row.role} is never quantized"
    return Fault(where=module, expected=f"{form(row.tensor)}: {reason}", got="a quantized weight")


def wrong_parts(
    module: str,
    parts: Mapping[str, Part],
    found: Mapping[str, TensorInfo | None],
    scheme: DeclaredScheme,
) -> list[Fault]:
    """Parts of a quantized linear, by suffix, that are absent or of another dtype or shape."""
    faults = []
    for suffix, part in parts.items():
        tensor = found[suffix]
        if not part.fits(tensor):
            expected = f"{' or '.join(part.dtypes)} {list(part.shape)} ({scheme})"
            got = form(tensor) if tensor else "none"
            faults.append(Fault(where=f"{module}.{suffix}", expected=expected, got=got))
    return faults


def form(tensor: TensorInfo) -> str:
    """Dtype and shape, for a fault."""
    return f"{tensor.dtype} {list(tensor.shape)}"
