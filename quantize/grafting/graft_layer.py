"""`graft_layer`: a target's folder with an MTP layer in it; its own shards are linked."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from ...recipes.errors import CheckpointError, LayoutError
from ...recipes.packages import package_version
from ..drafts.config_reader import with_text_config
from ..engines.contract import EngineCheck
from ..engines.engine_check import check_checkpoint
from ..files import provenance as records
from ..files.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    UNVERIFIED_CONFIG_FILE,
    Checkpoint,
    mtp_layers,
    open_weights,
    read_json_object,
)
from ..files.hub import DraftSource, recorded_argv
from ..files.provenance_file import check_recorded, check_seal, read_provenance
from ..files.publish import (
    LinkChoice,
    LinkedAs,
    Rewrite,
    check_no_other_weights,
    hard_links_work,
    json_texts,
    place,
    publish,
)
from ..files.safetensors_file import SafetensorsFile
from ..files.safetensors_header import Header, TensorInfo, read_header
from ..files.staging import check_output, staging_name
from ..planning.outputs import ONLY_OF_CODES
from ..stored.layouts import HF_QUANT_CONFIG
from ..stored.stored_declaration import RawDeclaration, raw_declaration
from ..stored.stored_draft import StoredDraft
from ..verify import GraftVerification, check_faults, verify_graft
from . import grafted_layer as mtp
from .conventions import Merged, merged_declaration

_COUNT = "num_nextn_predict_layers"
_COUNT_OF_QWEN = "mtp_num_hidden_layers"
_DECLARATION, _NESTED, _TEXT = "quantization_config", "quantization", "text_config"
_ELSEWHERE = "compression_config"


def _with_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Engines read `num_nextn_predict_layers`, or `mtp_num_hidden_layers` of Qwen's text model."""
    text = config.get(_TEXT)
    if isinstance(text, Mapping):
        key = _COUNT if _COUNT in text else _COUNT_OF_QWEN
        return {**config, _TEXT: {**text, key: count}}
    if _COUNT_OF_QWEN in config:
        return {**config, _COUNT_OF_QWEN: count}
    return {**config, _COUNT: count}


def _check_one_declaration(target: Checkpoint) -> None:
    text = target.config.get(_TEXT)
    nested = isinstance(text, Mapping) and text.get(_DECLARATION) is not None
    if nested or target.config.get(_ELSEWHERE) is not None:
        where = target.folder / CONFIG_FILE
        place = f"{_TEXT}.{_DECLARATION}" if nested else _ELSEWHERE
        raise CheckpointError(
            where,
            f"declares its quantization in {place}",
            fix="move it to quantization_config, where engines read it first",
        )


def _declared_documents(
    target: Checkpoint, config: Mapping[str, Any], raw: RawDeclaration | None, merged: Merged | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and hf_quant_config.json (which stays nested) with the new declaration."""
    side_path = target.folder / HF_QUANT_CONFIG
    side = read_json_object(side_path, "export it again") if side_path.is_file() else None
    if merged is None:
        return dict(config), side
    if raw is not None and raw.form == "side file":
        return dict(config), _nested(side or {}, merged.value)
    nested = raw is not None and raw.form == "nested"
    declared = _nested(config[_DECLARATION], merged.value) if nested else merged.value
    side = None if side is None else _nested(side, merged.value)
    return {**config, _DECLARATION: declared}, side


def _nested(declared: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    inner = declared.get(_NESTED)
    if not isinstance(inner, Mapping):
        return {**declared}
    nested = {key: value[key] for key in inner if key in value}
    return {**declared, _NESTED: {**inner, **nested}}


def _index_text(target: Checkpoint, weight_map: Mapping[str, str], nbytes: int) -> str:
    """The target's index with the layer's files, without a parameter count: engines read none."""
    metadata = {**((target.index or {}).get("metadata") or {}), "total_size": nbytes}
    metadata.pop("total_parameters", None)
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return json_texts({INDEX_FILE: index})[INDEX_FILE]


_GOOD = ("LOADS", "UNKNOWN")


def _predictions(
    inside: Checkpoint, merged: Merged | None, *, has_side_file: bool
) -> tuple[EngineCheck, ...]:
    """Each engine's answer on the layer, by the declaration that the whole will have."""
    layers = with_text_config(inside.config).get("num_hidden_layers")
    checks = []
    for engine in mtp.ENGINES:
        check = check_checkpoint(
            inside, engine=engine, target_layers=layers, has_side_file=has_side_file
        )
        why = merged.cannot.get(engine) if merged else None
        if why is not None and check.verdict in _GOOD:
            check = replace(check, verdict="REFUSED", error=f"{check.title}: {why}", remedy=None)
        checks.append(check)
    if not any(check.verdict in _GOOD for check in checks):
        why = "; ".join(f"{check.title}: {check.error}" for check in checks)
        fix = next((check.remedy for check in checks if check.remedy), "graft it unquantized")
        raise LayoutError("graft", f"no engine would load the layer in this target: {why}", fix=fix)
    return tuple(checks)


_SHARD_BYTES = 5 << 30
_STEM = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraftPlan:
    """What is linked, what is written anew, and what is declared.

    Attributes:
        shards: new file -> the tensors of the layer's folder that it holds.
        rewritten: files of the target that hold replaced tensors -> what stays of each.
        replaced: names of tensors of the target that the layer replaces.
        left_out: tables of the layer's folder that equal the target's.
        documents: text of index, config.json and hf_quant_config.json.
    """

    target: Checkpoint
    source: DraftSource
    stored: StoredDraft
    layer: mtp.GraftedLayer
    prefixes: tuple[str, ...]
    shards: Mapping[str, tuple[TensorInfo, ...]]
    linked: tuple[str, ...]
    rewritten: Mapping[str, Header]
    replaced: tuple[str, ...]
    left_out: tuple[str, ...]
    side_files: tuple[str, ...]
    documents: Mapping[str, str]
    checks: tuple[EngineCheck, ...]

    @property
    def grafted(self) -> tuple[TensorInfo, ...]:
        """The layer's tensors that go in."""
        return tuple(tensor for tensors in self.shards.values() for tensor in tensors)

    @property
    def written_bytes(self) -> int:
        """Tensor bytes of the files that are written anew, without headers."""
        kept = (tensor for header in self.rewritten.values() for tensor in header.tensors)
        return sum(tensor.nbytes for tensor in (*self.grafted, *kept))

    @property
    def linked_bytes(self) -> int:
        """Bytes of the linked files, which are copied where nothing can be linked."""
        return sum((self.target.folder / file).stat().st_size for file in self.linked)


def plan_graft(target: Path, source: DraftSource, *, replace: bool = False) -> GraftPlan:
    """What a target becomes with a layer in it, from the layer's folder or a model's subtree."""
    whole = Checkpoint.open(target, is_target=True)
    _check_one_declaration(whole)
    stored = StoredDraft.read(source.checkpoint())
    prefixes = mtp.layer_prefixes(stored, source)
    headers = {file: read_header(target, file) for file in whole.headers}
    names = [tensor.name for header in headers.values() for tensor in header.tensors]
    replaced = mtp.check_free(whole, names, prefixes, replace=replace)
    rest = {file: header.only(set(names) - replaced) for file, header in headers.items()}
    stay = {tensor.name: tensor.file for tensor in _tensors(rest)}
    config = _with_layers(whole.config, len({*mtp_layers(list(stay)), *prefixes}))
    mtp.check_fits(whole, config, stored)
    mtp.check_numbers(whole, stored, prefixes)
    left_out = mtp.check_tables(whole, stored, prefixes)
    grafted = [t for name, t in stored.checkpoint.tensors.items() if name not in left_out]
    modules = {t.name.rpartition(".")[0] for header in rest.values() for t in header.tensors}
    called = mtp.layer_names(stored.draft.family, prefixes, config, modules)
    layer = mtp.grafted_layer(stored, called)
    raw = raw_declaration(whole)
    merged = merged_declaration(raw, layer)
    declared, side = _declared_documents(whole, config, raw, merged)
    shards = _shards(grafted, [file for file, header in rest.items() if header.tensors])
    index = _index_text(
        whole,
        {**stay, **{t.name: file for file, tensors in shards.items() for t in tensors}},
        nbytes=sum(t.nbytes for t in (*_tensors(rest), *grafted)),
    )
    inside = Checkpoint(
        folder=target,
        config=declared,
        tensors={tensor.name: tensor for tensor in grafted},
        headers={},
        index=None,
        subtree=",".join(prefixes),
    )
    side_files = [file for file in whole.side_files() if file not in ONLY_OF_CODES]
    check_no_other_weights(target, side_files, travel="along", made="grafted")
    return GraftPlan(
        target=whole,
        source=source,
        stored=stored,
        layer=layer,
        prefixes=prefixes,
        shards=shards,
        linked=tuple(f for f, header in rest.items() if header == headers[f]),
        rewritten={f: h for f, h in rest.items() if h.tensors and h != headers[f]},
        replaced=tuple(sorted(replaced)),
        left_out=tuple(sorted(left_out)),
        side_files=tuple(side_files),
        documents={
            **(json_texts({HF_QUANT_CONFIG: side}) if side is not None else {}),
            INDEX_FILE: index,
            CONFIG_FILE: json.dumps(declared, indent=2, ensure_ascii=False) + "\n",
        },
        checks=_predictions(inside, merged, has_side_file=side is not None),
    )


def _tensors(headers: Mapping[str, Header]) -> Iterator[TensorInfo]:
    for header in headers.values():
        yield from header.tensors


def _shards(
    grafted: Sequence[TensorInfo], taken: Collection[str]
) -> dict[str, tuple[TensorInfo, ...]]:
    """New files for the layer, none larger than 5 GiB unless one tensor is."""
    parts: list[list[TensorInfo]] = [[]]
    size = 0
    for tensor in grafted:
        if parts[-1] and size + tensor.nbytes > _SHARD_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    stem = _STEM
    while any(file.startswith(f"{stem}-") or file == f"{stem}.safetensors" for file in taken):
        stem += "-grafted"
    if len(parts) == 1:
        return {f"{stem}.safetensors": tuple(parts[0])}
    return {
        f"{stem}-{i:05}-of-{len(parts):05}.safetensors": tuple(part)
        for i, part in enumerate(parts, start=1)
    }


_METADATA = {"format": "pt"}
_MADE = records.QuantizedProvenance | records.TranscodedProvenance | records.DequantizedProvenance


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GraftReport(Brief):
    """A target's folder with a layer in it.

    Attributes:
        out: the folder that was written.
        layers: prefixes of the layers that were put in.
        scheme: how the layers' linears are stored; None where none is quantized.
        linked: file of the target -> how it came into the folder.
        rewritten: files of the target that were written again without the replaced tensors.
        written: files that are new.
        replaced: number of the target's tensors that the layer replaces.
        left_out: tables of the layer's folder that the target has.
        target_tensors: number of the target's tensors, all unchanged.
        layer_tensors: number of the layer's.
        bytes_written: bytes of the written tensors.
        checks: what each engine is predicted to do with the layer.
    """

    out: Path
    layers: tuple[str, ...]
    scheme: str | None
    linked: Mapping[str, LinkedAs]
    rewritten: tuple[str, ...]
    written: tuple[str, ...]
    replaced: int
    left_out: tuple[str, ...]
    target_tensors: int
    layer_tensors: int
    bytes_written: int
    checks: tuple[EngineCheck, ...]

    @override
    def brief(self) -> Mapping[str, object]:
        ways = list(self.linked.values())
        return {
            "out": self.out,
            "layers": ", ".join(self.layers),
            "scheme": self.scheme or "not quantized",
            "target": ", ".join(f"{ways.count(way)} by {way}" for way in dict.fromkeys(ways)),
            "written": megabytes(self.bytes_written),
            "engines": ", ".join(f"{check.title}: {check.verdict}" for check in self.checks),
        }


def graft_layer(
    plan: GraftPlan,
    out: Path,
    *,
    link: LinkChoice,
    argv: Sequence[str],
    on_progress: Callable[[int], None],
    on_stage: Callable[[str], None],
) -> GraftReport:
    """Write the folder: link, write, verify by re-reading, rename. The target is only read.

    `link` says how the target's unchanged files come in; those that cannot be linked are copied.
    """
    for folder in (plan.target.folder, plan.source.folder):
        check_output(out, folder)
    made_by = _made_by(plan)
    if link == "hard" and plan.linked:
        first, beside = plan.target.folder / plan.linked[0], f"{staging_name(out.name)}.link"
        link = "hard" if hard_links_work(first, out.absolute().parent, beside) else "none"
    copied = plan.linked_bytes if link == "none" else 0
    graft = _Graft(
        out=out,
        folder=plan.target.folder,
        tensor_bytes=plan.written_bytes + copied,
        side_files=plan.side_files,
        documents=plan.documents,
        plan=plan,
        link=link,
        argv=argv,
        made_by=made_by,
        linked={},
        on_progress=on_progress,
    )
    verification = publish(graft, on_stage)
    return GraftReport(
        out=out,
        layers=plan.prefixes,
        scheme=plan.layer.scheme,
        linked=graft.linked,
        rewritten=tuple(plan.rewritten),
        written=tuple(plan.shards),
        replaced=len(plan.replaced),
        left_out=plan.left_out,
        target_tensors=verification.target_tensors,
        layer_tensors=verification.layer_tensors,
        bytes_written=plan.written_bytes + copied,
        checks=plan.checks,
    )


def _made_by(plan: GraftPlan) -> _MADE | None:
    record = read_provenance(plan.source.folder)
    check_seal(plan.source.folder, record)
    if isinstance(record, records.GraftedProvenance):
        return record.quantized_by if record.layers == plan.prefixes else None
    return record if isinstance(record, _MADE) and plan.source.subtree is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graft(Rewrite[GraftVerification]):
    """One run; `made_by` is draftquant.json of the layer's folder, None where it had none."""

    plan: GraftPlan
    link: LinkChoice
    argv: Sequence[str]
    made_by: _MADE | None
    linked: dict[str, LinkedAs]
    on_progress: Callable[[int], None]

    @override
    def write_tensors(self, staging: Path) -> None:
        plan = self.plan
        for file in plan.linked:
            self.linked[file] = place(plan.target.folder / file, staging / file, self.link)
        for file, header in plan.rewritten.items():
            self._write(staging / file, plan.target.folder, header.tensors, header.metadata)
        for file, tensors in plan.shards.items():
            self._write(staging / file, plan.source.folder, tensors, _METADATA)

    def _write(
        self, path: Path, folder: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, str]
    ) -> None:
        stored = [tensor.as_stored for tensor in tensors]
        with ExitStack() as stack:
            out = stack.enter_context(SafetensorsFile(path, stored, metadata, synced=False))
            files = sorted({tensor.file for tensor in tensors})
            sources = {file: stack.enter_context(open_weights(folder / file)) for file in files}
            for tensor in tensors:
                out.copy(sources[tensor.file], tensor)
                self.on_progress(tensor.nbytes)

    @override
    def verify(self, staging: Path) -> GraftVerification:
        plan = self.plan
        report = verify_graft(
            staging,
            plan.target.folder,
            plan.prefixes,
            layer=plan.stored.checkpoint,
            config_file=UNVERIFIED_CONFIG_FILE,
        )
        fix = "run again; if it stays, report this"
        check_faults(self.out, plan.source.folder, report.faults, fix=fix)
        if self.made_by is not None:
            check_recorded(plan.source.folder, self.made_by.tensor_digests, report.layer_digests)
        return report

    @override
    def provenance(self, verification: GraftVerification) -> records.GraftedProvenance:
        plan = self.plan
        return records.GraftedProvenance(
            draftquant=package_version("draftquant"),
            argv=recorded_argv(self.argv),
            layers=plan.prefixes,
            replaced=plan.replaced,
            target=verification.header_digests,
            source=records.SourceFolder(hub_id=plan.source.hub_id, revision=plan.source.revision),
            tensor_digests=verification.layer_digests,
            quantized_by=self.made_by,
        )
