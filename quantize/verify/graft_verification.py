"""A target's folder with a layer in it, against the target and the layer's own folder.

A file of the target that is in both folders the same file (a link) is not read twice: of it the
header shows that it is a file of tensors. Every other tensor is compared byte for byte.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from ...recipes.errors import CheckpointError, DraftQuantError, VerifyError
from ...recipes.regular_file import entries
from ..files.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    PROVENANCE_FILE,
    Checkpoint,
    open_weights,
    pread_exactly,
)
from ..files.digests import NEWEST, Algorithm, Digest, tensor_digest
from ..files.provenance import GraftedProvenance
from ..files.provenance_file import sealed
from ..files.safetensors_header import TensorInfo
from ..stored.layouts import HF_QUANT_CONFIG, DeclaredScheme
from ..stored.stored_declaration import raw_declaration, read_scheme
from ..stored.stored_draft import StoredDraft
from .folder_faults import index_faults, same_bytes
from .verify_report import Fault, compare_kept

# ---- What config.json says of the target's own linears is what it said before the graft

_MAY_CHANGE = frozenset(
    {"quantization_config", "num_nextn_predict_layers", "mtp_num_hidden_layers"}
)
_OF_LINEARS = frozenset(
    {
        "config_groups",
        "exclude",
        "exclude_modules",
        "format",
        "ignore",
        "ignored_layers",
        "layer_quant_config",
        "modules_to_not_convert",
        "quantized_layers",
    }
)
"""Keys of a declaration that say how linears are stored: a graft adds the layer's."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


def config_faults(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Fault]:
    """Keys of config.json that a graft has no business with."""
    for key in sorted(before.keys() | after.keys()):
        here, there = before.get(key), after.get(key)
        if key == "text_config" and isinstance(here, Mapping) and isinstance(there, Mapping):
            yield from config_faults(here, there)
        elif key not in _MAY_CHANGE and here != there:
            yield Fault(where=f"config.json: {key}", expected=repr(here), got=repr(there))


def declaration_faults(
    before: Checkpoint, after: Checkpoint, own: Mapping[str, TensorInfo]
) -> tuple[list[Fault], bool]:
    """Whether each linear of the target is declared as it was.

    Returns:
        The faults; and whether both declarations were understood.
    """
    faults = [*_other_keys(before, after)]
    try:
        was_of = _scheme(before)
    except DraftQuantError:
        return faults, False
    try:
        now_of = _scheme(after)
        for module in _modules(own):
            was, now = _meant(was_of, module), _meant(now_of, module)
            if was != now:
                faults.append(Fault(where=f"declaration of {module}", expected=was, got=now))
    except DraftQuantError as exc:
        faults.append(Fault(where=str(exc.where), expected="what is understood", got=exc.what))
    return faults, True


def _other_keys(before: Checkpoint, after: Checkpoint) -> Iterator[Fault]:
    """What the target declares besides its linears: a graft leaves it as it is."""
    try:
        was, now = raw_declaration(before), raw_declaration(after)
    except DraftQuantError as exc:
        yield Fault(where=str(exc.where), expected="a declaration", got=exc.what)
        return
    if was is None or not isinstance(was.value, Mapping):
        return
    if now is None or not isinstance(now.value, Mapping):
        got = "none" if now is None else repr(now.value)
        yield Fault(where="quantization_config", expected="the target's", got=got)
        return
    for key in sorted((was.value.keys() | now.value.keys()) - _OF_LINEARS):
        here, there = was.value.get(key), now.value.get(key)
        if here != there:
            where = f"quantization_config: {key}"
            yield Fault(where=where, expected=repr(here), got=repr(there))


def _modules(own: Mapping[str, TensorInfo]) -> Collection[str]:
    """Of the target's linears, one expert for all of its layer."""
    modules: dict[str, str] = {}
    for name, tensor in own.items():
        if len(tensor.shape) == 2:
            module = name.rpartition(".")[0]
            modules.setdefault(_EXPERT.sub(".experts.*.", module), module)
    return modules.values()


def _scheme(checkpoint: Checkpoint) -> DeclaredScheme | None:
    raw = raw_declaration(checkpoint)
    return None if raw is None else read_scheme(raw, strictness="declaration")


def _meant(scheme: DeclaredScheme | None, module: str) -> str:
    if scheme is None or scheme.is_excluded(module):
        return "floats"
    found = scheme.of(module)
    return "floats" if found is None else str(found).partition(";")[0]


# ---- The files beside the tensors of a target's folder with a layer in it

_OWN = frozenset({CONFIG_FILE, INDEX_FILE, PROVENANCE_FILE, HF_QUANT_CONFIG})
_OF_THE_HUB = frozenset({".gitattributes", "model.sig"})


def file_faults(before: Checkpoint, after: Checkpoint, config_file: str) -> Iterator[Fault]:
    """The target's side files are there, byte for byte, and no file is nobody's."""
    travel = set(before.side_files()) - _OWN
    for file in sorted(travel):
        here, there = before.folder / file, after.folder / file
        if not there.is_file():
            yield Fault(where=file, expected="the target's file", got="none")
        elif not same_bytes(here, there):
            yield Fault(where=file, expected="the target's bytes", got="others")
    side = {HF_QUANT_CONFIG} & set(before.side_files())
    known = {*travel, *(_OWN - {HF_QUANT_CONFIG}), *side, *_OF_THE_HUB, config_file, *after.headers}
    for file, _ in entries(after.folder):
        if file not in known:
            yield Fault(where=file, expected="a file of the target or the layer", got="neither")


# ---- Tables beside a grafted layer in its own folder: they are the target's, which serves its own
#
# A head of a target that stores none is tied to its embedding. What the target stores quantized
# cannot be compared byte for byte, and is not.

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def table_faults(target: Checkpoint, layer: Checkpoint, starts: tuple[str, ...]) -> Iterator[Fault]:
    """Those that are not the target's.

    Args:
        target: the folder without the layer.
    """
    for name, tensor in sorted(layer.tensors.items()):
        if name.startswith(starts) or not name.endswith((_EMBEDDING, _HEAD)):
            continue
        whole = target.tensors.get(name)
        if whole is None and name.endswith(_HEAD) and not _stores_a_head(target):
            whole = _embedding(target)
        if whole is None or whole.dtype != tensor.dtype:
            continue
        if whole.shape != tensor.shape or (
            tensor_digest(layer, tensor) != tensor_digest(target, whole)
        ):
            yield Fault(
                where=f"{name} of the layer's own folder",
                expected=f"the target's {whole.name}",
                got="another table, for which the layer was trained",
            )


def _stores_a_head(target: Checkpoint) -> bool:
    return any(".lm_head." in f".{name}" for name in target.tensors if ".layers." not in name)


def _embedding(target: Checkpoint) -> TensorInfo | None:
    found = [t for n, t in sorted(target.tensors.items()) if n.endswith(_EMBEDDING)]
    return next((tensor for tensor in found if ".layers." not in tensor.name), None)


_PREFIX_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GraftVerification(Brief):
    """How a target's folder with a layer in it compares with the target and the layer.

    Attributes:
        output: the folder.
        target: the folder whose layers it has besides.
        layers: prefixes of what was put in.
        target_tensors: number of the target's tensors that must be in it.
        same_file: of these, those that lie in one file which is in both folders (a link).
        layer_tensors: number of the layer's tensors.
        bytes_compared: bytes of tensors that were read and compared, of both sides.
        with_layer: the layer was compared with its own folder, not with recorded digests alone.
        declared: whether what is declared of the target's linears could be compared.
        header_digests: each file of the target that is in the folder -> digest of its header.
        layer_digests: tensor of the layer -> digest.
        faults: everything that is wrong.
    """

    output: str
    target: str
    layers: tuple[str, ...]
    target_tensors: int
    same_file: int
    layer_tensors: int
    bytes_compared: int
    with_layer: bool
    declared: bool
    header_digests: Mapping[str, str]
    layer_digests: Mapping[str, str]
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.faults

    def to_mapping(self) -> dict[str, Any]:
        """The report as JSON values, without the digests."""
        return {
            "ok": self.ok,
            "output": self.output,
            "target": self.target,
            "layers": list(self.layers),
            "target_tensors": self.target_tensors,
            "same_file": self.same_file,
            "layer_tensors": self.layer_tensors,
            "bytes_compared": self.bytes_compared,
            "with_layer": self.with_layer,
            "declared": self.declared,
            "faults": [str(fault) for fault in self.faults],
        }

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
    algorithm: Algorithm = NEWEST,
    on_progress: Callable[[int], None] = lambda _count: None,
) -> GraftVerification:
    """Compare every tensor, the config and the other files.

    Args:
        target: the folder without it.
        layer: the layer as its own folder has it; None = hold it against the record.
        record: draftquant.json of `output`; None = it is not written yet.
        config_file: its name in a staging folder, see `Checkpoint.open`.
        on_progress: called with bytes read.

    Raises:
        CheckpointError: `target` is not a checkpoint.
    """
    before = Checkpoint.open(target, is_target=True)
    said = str(output), str(target), tuple(sorted(layers))
    try:
        after = Checkpoint.open(output, config_file=config_file, is_target=True)
    except CheckpointError as exc:
        return _unread(said, layer is not None, _unreadable(exc))
    found = _Comparison(before=before, after=after, algorithm=algorithm, on_progress=on_progress)
    starts = tuple(f"{prefix}." for prefix in layers)
    grafted = {name: t for name, t in after.tensors.items() if name.startswith(starts)}
    own = {name: t for name, t in before.tensors.items() if not name.startswith(starts)}
    faults = [*found.names(own, grafted), *found.of_target(own)]
    digests, wrong = found.of_layer(grafted, layer)
    faults += wrong
    headers = _header_digests(after, before)
    if record is not None:
        faults += _record_faults(record, digests, headers)
    faults += config_faults(before.config, after.config)
    about, is_declared = declaration_faults(before, after, own)
    faults += about
    faults += _layer_faults(output, config_file, layers, layer)
    faults += index_faults(after)
    if layer is not None:
        faults += table_faults(before, layer, starts)
    faults += file_faults(before, after, config_file)
    return GraftVerification(
        output=said[0],
        target=said[1],
        layers=said[2],
        target_tensors=len(own),
        same_file=found.num_same,
        layer_tensors=len(grafted),
        bytes_compared=found.num_bytes,
        with_layer=layer is not None,
        declared=is_declared,
        header_digests=headers,
        layer_digests=digests,
        faults=tuple(faults),
    )


def _unread(
    said: tuple[str, str, tuple[str, ...]], with_layer: bool, fault: Fault
) -> GraftVerification:
    return GraftVerification(
        output=said[0],
        target=said[1],
        layers=said[2],
        target_tensors=0,
        same_file=0,
        layer_tensors=0,
        bytes_compared=0,
        with_layer=with_layer,
        declared=False,
        header_digests={},
        layer_digests={},
        faults=(fault,),
    )


def _unreadable(exc: CheckpointError) -> Fault:
    return Fault(where=str(exc.where), expected="a checkpoint as it is declared", got=exc.what)


class _Comparison:
    """Of the tensors of two folders; counts what it has read."""

    def __init__(
        self,
        *,
        before: Checkpoint,
        after: Checkpoint,
        algorithm: Algorithm,
        on_progress: Callable[[int], None],
    ) -> None:
        self._before, self._after = before, after
        self._algorithm, self._on_progress = algorithm, on_progress
        self._same = frozenset(_same_files(before, after))
        self.num_same = self.num_bytes = 0

    def _read(self, count: int) -> None:
        self.num_bytes += count
        self._on_progress(count)

    def names(
        self, own: Mapping[str, TensorInfo], grafted: Mapping[str, TensorInfo]
    ) -> Iterator[Fault]:
        """Tensors that are neither the target's nor the layer's; and that there is a layer."""
        for name in sorted(self._after.tensors.keys() - own.keys() - grafted.keys()):
            yield Fault(where=name, expected="a tensor of the target or the layer", got="neither")
        if not grafted:
            yield Fault(where="the layer", expected="its tensors", got="none")

    def of_target(self, own: Mapping[str, TensorInfo]) -> Iterator[Fault]:
        """The target's tensors: in the same file, or of the same bytes."""
        for name, tensor in own.items():
            other = self._after.tensors.get(name)
            if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
                yield Fault(where=name, expected=_said(tensor), got=_said(other))
            elif tensor.file in self._same and other == tensor:
                self.num_same += 1
            else:
                yield from compare_kept(
                    self._before, self._after, tensor, self._read, self._algorithm
                ).faults

    def of_layer(
        self, grafted: Mapping[str, TensorInfo], layer: Checkpoint | None
    ) -> tuple[dict[str, str], list[Fault]]:
        """Digests of the layer's tensors, each compared with its own folder's if there is one.

        The tables that stand beside a layer in a folder of its own are the target's.
        """
        digests: dict[str, str] = {}
        faults: list[Fault] = []
        if layer is None:
            for name, tensor in grafted.items():
                digests[name] = tensor_digest(self._after, tensor, self._algorithm)
                self._read(tensor.nbytes)
            return digests, faults
        starts = tuple({f"{name.partition('.')[0]}." for name in grafted})
        for name, tensor in layer.tensors.items():
            other = grafted.get(name)
            if other is None and name in self._before.tensors:
                continue
            if other is None and not name.startswith(starts):
                continue
            if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
                faults.append(Fault(where=name, expected=_said(tensor), got=_said(other)))
                continue
            found = compare_kept(layer, self._after, tensor, self._read, self._algorithm)
            digests |= found.output_digests
            faults += found.faults
        for name in sorted(grafted.keys() - layer.tensors.keys()):
            faults.append(Fault(where=name, expected="none: the layer has no such", got="one"))
        return digests, faults


def _said(tensor: TensorInfo | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _same_files(before: Checkpoint, after: Checkpoint) -> Iterator[str]:
    """Files of one name that are one file of the disk."""
    for file in before.headers.keys() & after.headers.keys():
        if (before.folder / file).samefile(after.folder / file):
            yield file


def _header_digests(after: Checkpoint, before: Checkpoint) -> dict[str, str]:
    """Of every file that has the name of one of the target's, read again from the output."""
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
) -> Iterator[Fault]:
    """What draftquant.json says is so, and it was not edited."""
    for key, said, found in (
        ("tensor_digests", record.digests, digests),
        ("target", record.target, headers),
    ):
        for name in sorted(said.keys() | found.keys()):
            if said.get(name) != found.get(name):
                where = f"draftquant.json: {key}.{name}"
                yield Fault(where=where, expected=str(found.get(name)), got=str(said.get(name)))
    if sealed(record).sha256 != record.sha256:
        yield Fault(where="draftquant.json: sha256", expected="its seal", got=record.sha256)


def _layer_faults(
    output: Path, config_file: str, layers: Collection[str], layer: Checkpoint | None
) -> list[Fault]:
    """The layer is stored as the folder declares it, and as its own folder did.

    What another tool declares of the target may not be understood; then the engines are asked.
    """
    try:
        inside = StoredDraft.read(
            Checkpoint.open(
                output, config_file=config_file, subtree=",".join(layers), is_target=True
            )
        )
        own = StoredDraft.read(layer) if layer is not None else None
    except VerifyError:
        return []
    except CheckpointError as exc:
        return [_unreadable(exc)]
    if own is None:
        return []
    faults = []
    for row in own.draft.rows:
        here, there = (None if s is None else str(s).partition(";")[0] for s in (
            own.scheme_of(row), inside.scheme_of(row)))  # fmt: skip
        if row.module in inside.modules | own.modules and here != there:
            faults.append(Fault(where=row.module, expected=str(here), got=str(there)))
    return faults
