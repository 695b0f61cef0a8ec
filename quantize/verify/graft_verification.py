"""A target's folder with a layer in it, against the target and the layer's own folder.

A file of the target that is the same file in both folders (a link) is not read twice: its
header shows that it is a file of tensors. Every other tensor is compared byte by byte.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...recipes.brief import megabytes
from ...recipes.errors import CheckpointError, DraftQuantError, VerifyError
from ...recipes.regular_file import SIGNATURE_FILE, entries
from ..drafts import Row
from ..files.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    PROFILE_FILE,
    PROVENANCE_FILE,
    Checkpoint,
    open_weights,
    pread_exactly,
)
from ..files.digests import Digest, tensor_digest
from ..files.provenance import GraftedProvenance
from ..files.provenance_file import sealed
from ..files.safetensors_header import TensorInfo
from ..stored.layouts import HF_QUANT_CONFIG
from ..stored.layouts.scheme import DeclaredScheme
from ..stored.stored_declaration import raw_declaration, read_scheme
from ..stored.stored_draft import StoredDraft
from ..stored.stored_tables import EMBEDDING, HEAD
from .comparison import (
    BytesRead,
    Compared,
    Fault,
    Sides,
    Verified,
    compare_all,
    compare_kept,
    differing,
    form,
)
from .demands import digest_pairs, recorded
from .folder_faults import index_faults, travelled_faults

_PREFIX_BYTES = 8
_EXPERT = re.compile(r"\.experts\.\d+\.")
_CHANGING = frozenset({"quantization_config", "num_nextn_predict_layers", "mtp_num_hidden_layers"})
_OF_LINEARS = frozenset({
    "config_groups", "exclude", "exclude_modules", "format", "ignore", "ignored_layers",
    "layer_quant_config", "modules_to_not_convert", "quantized_layers",
})  # fmt: skip
"""Keys of a declaration that say how linears are stored: a graft adds the layer's."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GraftVerification(Verified):
    """How a target's folder with a layer in it compares with the target and the layer.

    Attributes:
        layers: prefixes of the layers that were put in.
        same_file: target tensors that lie in one file which is in both folders (a link).
        bytes_compared: bytes of tensors that were read and compared, of both sides.
        with_layer: the layer was compared with its own folder, not only with recorded digests.
        declared: whether the declaration of the target's linears could be compared.
        header_digests: each file of the target that is in the folder -> digest of its header.
    """

    output: str
    target: str
    layers: tuple[str, ...]
    target_tensors: int = 0
    same_file: int = 0
    layer_tensors: int = 0
    bytes_compared: int = 0
    with_layer: bool
    declared: bool = False
    header_digests: Mapping[str, str] = field(default_factory=dict)
    layer_digests: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...]

    def to_mapping(self) -> dict[str, Any]:
        """The report as JSON values, without the digests."""
        names = (f.name for f in fields(self) if not f.name.endswith("_digests"))
        faults = [str(fault) for fault in self.faults]
        values = {name: getattr(self, name) for name in names}
        return {"ok": self.ok, **values, "layers": list(self.layers), "faults": faults}

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "verified": "yes" if self.ok else f"WRONG, {len(self.faults)} fault(s)",
            "layers": ", ".join(self.layers),
            "target": f"{self.target_tensors} tensors, {self.same_file} of them in linked files",
            "compared": megabytes(self.bytes_compared),
        }


def verify_graft(
    output: Path,
    target: Path,
    layers: Collection[str],
    *,
    layer: Checkpoint | None = None,
    record: GraftedProvenance | None = None,
    config_file: str = CONFIG_FILE,
    on_progress: Callable[[int], None] = lambda _count: None,
) -> GraftVerification:
    """Compare every tensor, the config and the other files.

    Args:
        layers: prefixes of the layers that were put in.
        layer: the layer as its own folder has it; None = compare it with the record.
        record: draftquant.json of `output`; None = it is not written yet.
    """
    before = Checkpoint.open(target, is_target=True)
    begun = partial(
        GraftVerification,
        output=str(output),
        target=str(target),
        layers=tuple(sorted(layers)),
        with_layer=layer is not None,
    )
    try:
        after = Checkpoint.open(output, config_file=config_file, is_target=True)
    except CheckpointError as exc:
        return begun(faults=(_unreadable(exc),))
    progress = BytesRead(on_progress)
    starts = tuple(f"{prefix}." for prefix in layers)
    grafted = {name: t for name, t in after.tensors.items() if name.startswith(starts)}
    target_tensors = {name: t for name, t in before.tensors.items() if not name.startswith(starts)}
    both = before.headers.keys() & after.headers.keys()
    same = {file for file in both if (before.folder / file).samefile(after.folder / file)}
    linked = {name for name, tensor in target_tensors.items() if tensor.file in same}
    others = [tensor for name, tensor in target_tensors.items() if name not in linked]
    sides = Sides(before, after, progress.add)
    of_target = compare_all(others, partial(_compare, sides))
    of_layer = _compare_layer(sides, grafted, layer)
    headers = _header_digests(after, before)
    about, is_declared = _declaration_faults(before, after, target_tensors)
    faults = (
        *_name_faults(target_tensors, grafted, after),
        *of_target.faults,
        *of_layer.faults,
        *(_record_faults(record, of_layer.output_digests, headers) if record else ()),
        *_config_faults(before.config, after.config),
        *about,
        *_layer_faults(after, layers, layer),
        *index_faults(after),
        *(_table_faults(before, layer, starts) if layer else ()),
        *_file_faults(before, after),
    )
    return begun(
        target_tensors=len(target_tensors), same_file=len(linked), layer_tensors=len(grafted),
        bytes_compared=progress.done, declared=is_declared, header_digests=headers,
        layer_digests=of_layer.output_digests, faults=faults,
    )  # fmt: skip


def _unreadable(exc: CheckpointError) -> Fault:
    return Fault(exc.where, "a checkpoint as it is declared", exc.what)


def _name_faults(
    target_tensors: Mapping[str, TensorInfo], grafted: Mapping[str, TensorInfo], after: Checkpoint
) -> Iterator[Fault]:
    """Tensors that belong to neither the target nor the layer; and a fault if there is no layer."""
    for name in sorted(after.tensors.keys() - target_tensors.keys() - grafted.keys()):
        yield Fault(name, "a tensor of the target or the layer", "neither")
    if not grafted:
        yield Fault("the layer", "its tensors", "none")


def _compare(sides: Sides, tensor: TensorInfo) -> Compared:
    other = sides.output.tensors.get(tensor.name)
    if form(other) == form(tensor):
        return compare_kept(sides, tensor)
    return Compared(faults=[Fault(tensor.name, form(tensor), form(other))])


def _compare_layer(
    sides: Sides, grafted: Mapping[str, TensorInfo], layer: Checkpoint | None
) -> Compared:
    """Digests of the layer's tensors, each compared with its own folder's if there is one."""
    if layer is None:
        digests = {n: tensor_digest(sides.output, t) for n, t in grafted.items()}
        sides.on_bytes(sum(tensor.nbytes for tensor in grafted.values()))
        return Compared(output_digests=digests)
    starts = tuple({f"{name.partition('.')[0]}." for name in grafted})
    tensors = [
        tensor
        for name, tensor in layer.tensors.items()
        if name in grafted or (name not in sides.source.tensors and name.startswith(starts))
    ]
    compared = compare_all(tensors, partial(_compare, replace(sides, source=layer)))
    for name in sorted(grafted.keys() - layer.tensors.keys()):
        compared.faults.append(Fault(name, "none: the layer has no such", "one"))
    return compared


def _header_digests(after: Checkpoint, before: Checkpoint) -> dict[str, str]:
    """Header digest of every file named like one of the target's, read from the output."""
    digests = {}
    for file in sorted(after.headers.keys() & before.headers.keys()):
        path = after.folder / file
        with open_weights(path) as descriptor:
            begin = bytearray(_PREFIX_BYTES)
            pread_exactly(descriptor, memoryview(begin), 0, path)
            text = bytearray(int.from_bytes(begin, "little"))
            pread_exactly(descriptor, memoryview(text), _PREFIX_BYTES, path)
        digest = Digest()
        digest.update(memoryview(begin + text))
        digests[file] = str(digest)
    return digests


def _record_faults(
    record: GraftedProvenance, digests: Mapping[str, str], headers: Mapping[str, str]
) -> list[Fault]:
    pairs = digest_pairs("tensor_digests", digests, record.tensor_digests)
    faults = recorded(pairs | digest_pairs("target", headers, record.target))
    if sealed(record).sha256 != record.sha256:
        faults.append(Fault(f"{PROVENANCE_FILE}: sha256", "its seal", record.sha256))
    return faults


def _config_faults(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Fault]:
    for key in sorted(before.keys() | after.keys()):
        here, there = before.get(key), after.get(key)
        if key == "text_config" and isinstance(here, Mapping) and isinstance(there, Mapping):
            yield from _config_faults(here, there)
        elif key not in _CHANGING and here != there:
            yield Fault(f"{CONFIG_FILE}: {key}", repr(here), repr(there))


def _declaration_faults(
    before: Checkpoint, after: Checkpoint, target_tensors: Mapping[str, TensorInfo]
) -> tuple[list[Fault], bool]:
    """Whether each linear of the target is declared as before; and whether both were understood."""
    faults = [*_other_keys(before, after)]
    try:
        was_of = _scheme(before)
    except DraftQuantError:
        return faults, False
    try:
        now_of = _scheme(after)
        declared = {m: (_meant(was_of, m), _meant(now_of, m)) for m in _modules(target_tensors)}
        faults += differing("declaration of ", declared)
    except DraftQuantError as exc:
        faults.append(Fault(exc.where, "what is understood", exc.what))
    return faults, True


def _other_keys(before: Checkpoint, after: Checkpoint) -> list[Fault]:
    """What the target declares besides its linears: a graft does not change it."""
    try:
        was, now = raw_declaration(before), raw_declaration(after)
    except DraftQuantError as exc:
        return [Fault(exc.where, "a declaration", exc.what)]
    if was is None or not isinstance(was.value, Mapping):
        return []
    if now is None or not isinstance(now.value, Mapping):
        got = "none" if now is None else repr(now.value)
        return [Fault("quantization_config", "the target's", got)]
    keys = sorted((was.value.keys() | now.value.keys()) - _OF_LINEARS)
    pairs = {key: (was.value.get(key), now.value.get(key)) for key in keys}
    return differing("quantization_config: ", pairs, "{!r}", "{!r}")


def _modules(tensors: Mapping[str, TensorInfo]) -> Collection[str]:
    modules: dict[str, str] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2:
            module = name.rpartition(".")[0]
            modules.setdefault(_EXPERT.sub(".experts.*.", module), module)
    return modules.values()


def _scheme(checkpoint: Checkpoint) -> DeclaredScheme | None:
    raw = raw_declaration(checkpoint)
    return None if raw is None else read_scheme(raw, strictness="declaration")


def _meant(scheme: DeclaredScheme | None, module: str) -> str:
    excluded = scheme is None or scheme.is_excluded(module)
    module_scheme = None if scheme is None or excluded else scheme.of(module)
    return "floats" if module_scheme is None else str(module_scheme).partition(";")[0]


def _layer_faults(
    after: Checkpoint, layers: Collection[str], layer: Checkpoint | None
) -> list[Fault]:
    """The layer is stored as the folder declares it, and as its own folder did.

    If another tool's declaration of the target is not understood, the engine tables decide.
    """
    of = {"config_file": after.config_file, "subtree": ",".join(layers)}
    try:
        inside = StoredDraft.read(Checkpoint.open(after.folder, **of, is_target=True))
        outside = StoredDraft.read(layer) if layer is not None else None
    except VerifyError:
        return []
    except CheckpointError as exc:
        return [_unreadable(exc)]
    if outside is None:
        return []

    def how(side: StoredDraft, row: Row) -> str | None:
        scheme = side.scheme_of(row)
        return None if scheme is None else str(scheme).partition(";")[0]

    return differing("", {r.module: (how(outside, r), how(inside, r)) for r in outside.draft.rows})


def _table_faults(
    target: Checkpoint, layer: Checkpoint, starts: tuple[str, ...]
) -> Iterator[Fault]:
    """Embedding and head beside the layer in its own folder equal the target's, which are served.

    A head of a target that stores none is tied to its embedding; a quantized one is not compared.
    """
    outside = {n: t for n, t in target.tensors.items() if ".layers." not in n}
    has_head = any(".lm_head." in f".{name}" for name in outside)
    embedding = next((t for name, t in outside.items() if name.endswith(EMBEDDING)), None)
    for name, tensor in layer.tensors.items():
        if name.startswith(starts) or not name.endswith((EMBEDDING, HEAD)):
            continue
        whole = target.tensors.get(name)
        if whole is None and name.endswith(HEAD) and not has_head:
            whole = embedding
        if whole is None or whole.dtype != tensor.dtype:
            continue
        if whole.shape != tensor.shape or (
            tensor_digest(layer, tensor) != tensor_digest(target, whole)
        ):
            other = "another table, for which the layer was trained"
            yield Fault(f"{name} of the layer's own folder", f"the target's {whole.name}", other)


def _file_faults(before: Checkpoint, after: Checkpoint) -> Iterator[Fault]:
    ours = {CONFIG_FILE, INDEX_FILE, PROVENANCE_FILE, PROFILE_FILE}
    side = {HF_QUANT_CONFIG} & set(before.side_files())
    travel = set(before.side_files()) - ours - side
    yield from travelled_faults(before, after, sorted(travel), whose="target", other="others")
    known = {".gitattributes", SIGNATURE_FILE, after.config_file, *after.headers}
    known |= travel | ours | side
    for file, _ in entries(after.folder):
        if file not in known:
            yield Fault(file, "a file of the target or the layer", "neither")
