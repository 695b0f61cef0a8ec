"""What a target's folder becomes with a layer in it. Headers are read, and of tables the bytes."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...recipes.errors import CheckpointError, DraftQuantError, LayoutError
from ..drafts.config_reader import with_text_config
from ..engines.contract import EngineCheck
from ..engines.engine_check import check_checkpoint
from ..files.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint, mtp_layers, read_json_object
from ..files.hub import DraftSource
from ..files.publish import check_no_other_weights, json_texts
from ..files.safetensors_header import Header, TensorInfo, read_header
from ..planning.outputs import ONLY_OF_CODES
from ..stored.layouts import HF_QUANT_CONFIG
from ..stored.stored_declaration import RawDeclaration, raw_declaration
from ..stored.stored_draft import StoredDraft
from . import grafted_layer as mtp
from .conventions import Merged, merged_declaration

_COUNT = "num_nextn_predict_layers"
_COUNT_OF_QWEN = "mtp_num_hidden_layers"
_DECLARATION, _NESTED, _TEXT = "quantization_config", "quantization", "text_config"
_ELSEWHERE = "compression_config"


def with_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """config.json that says how many MTP layers there are, in the family's own key.

    Engines read `num_nextn_predict_layers`, of Qwen3.5 `mtp_num_hidden_layers` of the text model.
    """
    text = config.get(_TEXT)
    if isinstance(text, Mapping):
        key = _COUNT if _COUNT in text else _COUNT_OF_QWEN
        return {**config, _TEXT: {**text, key: count}}
    if _COUNT_OF_QWEN in config:
        return {**config, _COUNT_OF_QWEN: count}
    return {**config, _COUNT: count}


def check_one_declaration(target: Checkpoint) -> None:
    """A declaration stands where engines and this package look for one."""
    text = target.config.get(_TEXT)
    nested = isinstance(text, Mapping) and text.get(_DECLARATION) is not None
    if nested or target.config.get(_ELSEWHERE) is not None:
        where = f"{_TEXT}.{_DECLARATION}" if nested else _ELSEWHERE
        raise CheckpointError(
            target.folder / CONFIG_FILE,
            f"declares its quantization in {where}",
            fix=f"move it to {_DECLARATION}, where engines read it first",
        )


def declared_documents(
    target: Checkpoint, config: Mapping[str, Any], raw: RawDeclaration | None, merged: Merged | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and hf_quant_config.json, whose nested form stays, with what is declared."""
    side_path = target.folder / HF_QUANT_CONFIG
    side = read_json_object(side_path, "export it again") if side_path.is_file() else None
    if merged is None:
        return dict(config), side
    if raw is None or raw.form == "flat":
        new = {**config, _DECLARATION: merged.value}
        return new, _nested(side, merged.value) if side is not None else None
    if raw.form == "nested":
        new = {**config, _DECLARATION: _nested(config[_DECLARATION], merged.value)}
        return new, _nested(side, merged.value) if side is not None else None
    return dict(config), _nested(side or {}, merged.value)


def _nested(declared: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    inner = declared.get(_NESTED)
    if not isinstance(inner, Mapping):
        return {**declared}
    own = {key: value[key] for key in (*inner, "quantized_layers") if key in value}
    return {**declared, _NESTED: {**inner, **own}}


def index_text(
    target: Checkpoint, weight_map: Mapping[str, str], nbytes: int, parameters: int | None
) -> str:
    """The target's with the layer's files, and what it counts counted again; None = not known."""
    metadata = dict((target.index or {}).get("metadata") or {})
    metadata["total_size"] = nbytes
    counted = metadata.pop("total_parameters", None)
    if type(counted) is int and parameters is not None:
        metadata["total_parameters"] = counted + parameters
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return json_texts({INDEX_FILE: index})[INDEX_FILE]


GOOD = ("LOADS", "UNKNOWN")


def predictions(
    target: Checkpoint,
    config: Mapping[str, Any],
    grafted: Sequence[TensorInfo],
    prefixes: Collection[str],
    merged: Merged | None,
    *,
    has_side_file: bool,
) -> tuple[EngineCheck, ...]:
    """One answer of each engine, by the declaration that the whole folder will have."""
    inside = Checkpoint(
        folder=target.folder,
        config=config,
        tensors={tensor.name: tensor for tensor in grafted},
        headers={},
        index=None,
        subtree=",".join(prefixes),
    )
    layers = with_text_config(config).get("num_hidden_layers")
    found = []
    for engine in mtp.ENGINES:
        check = check_checkpoint(
            inside, engine=engine, target_layers=layers, has_side_file=has_side_file
        )
        why = merged.cannot.get(engine) if merged else None
        if why is not None and check.verdict in GOOD:
            check = replace(check, verdict="REFUSED", error=f"{check.title}: {why}", remedy=None)
        found.append(check)
    if not any(check.verdict in GOOD for check in found):
        why = "; ".join(f"{check.title}: {check.error}" for check in found)
        raise LayoutError(
            "graft",
            f"no engine would load the layer in this target: {why}",
            fix=next((check.remedy for check in found if check.remedy), "graft it unquantized"),
        )
    return tuple(found)


_SHARD_BYTES = 5 << 30
_STEM = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraftPlan:
    """What is linked, what is written anew, and what is declared.

    Attributes:
        shards: new file -> the tensors of the layer's folder that it holds.
        rewritten: files of the target that hold replaced tensors -> what stays of each.
        replaced: names of tensors of the target that the layer stands in the place of.
        left_out: tables of the layer's folder that are the target's.
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
        """Tensor bytes of the files that are written anew, headers not counted."""
        kept = (tensor for header in self.rewritten.values() for tensor in header.tensors)
        return sum(tensor.nbytes for tensor in (*self.grafted, *kept))

    @property
    def linked_bytes(self) -> int:
        """Bytes of the files that are linked, which are written where nothing can be linked."""
        return sum((self.target.folder / file).stat().st_size for file in self.linked)


def plan_graft(target: Path, source: DraftSource, *, replace: bool = False) -> GraftPlan:
    """What a target becomes with a layer in it, of its own folder or a whole model's subtree."""
    whole = Checkpoint.open(target, is_target=True)
    check_one_declaration(whole)
    stored = StoredDraft.read(source.checkpoint())
    prefixes = mtp.layer_prefixes(stored, source)
    headers = {file: read_header(target, file) for file in whole.headers}
    names = [tensor.name for header in headers.values() for tensor in header.tensors]
    replaced = mtp.check_free(whole, names, prefixes, replace=replace)
    rest = {file: header.only(set(names) - replaced) for file, header in headers.items()}
    stay = {tensor.name: tensor.file for tensor in _tensors(rest)}
    config = with_layers(whole.config, len({*mtp_layers(list(stay)), *prefixes}))
    mtp.check_fits(whole, config, stored)
    mtp.check_numbers(whole, stored, prefixes)
    left_out = mtp.check_tables(whole, stored, prefixes)
    grafted = [t for name, t in stored.checkpoint.tensors.items() if name not in left_out]
    modules = {t.name.rpartition(".")[0] for header in rest.values() for t in header.tensors}
    layer = mtp.grafted_layer(
        stored, mtp.layer_names(stored.draft.family, prefixes, config, modules)
    )
    raw = raw_declaration(whole)
    merged = merged_declaration(raw.value if raw else None, layer)
    declared, side = declared_documents(whole, config, raw, merged)
    shards = _shards(grafted, [file for file, header in rest.items() if header.tensors])
    index = index_text(
        whole,
        {**stay, **{t.name: file for file, tensors in shards.items() for t in tensors}},
        nbytes=sum(t.nbytes for t in (*_tensors(rest), *grafted)),
        parameters=_parameters(whole, stored, left_out, prefixes, replaced),
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
        checks=predictions(
            whole, declared, grafted, prefixes, merged, has_side_file=side is not None
        ),
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
    total = len(parts)
    return {
        f"{stem}-{i:05}-of-{total:05}.safetensors": tuple(part)
        for i, part in enumerate(parts, start=1)
    }


def _parameters(
    target: Checkpoint,
    stored: StoredDraft,
    left_out: Collection[str],
    prefixes: Collection[str],
    replaced: Collection[str],
) -> int | None:
    """How many parameters more than the target's the output has; None = not known."""
    own = [row for row in stored.draft.rows if row.tensor.name not in left_out]
    added = sum(row.tensor.numel for row in own)
    if not replaced:
        return added
    try:
        before = Checkpoint.open(target.folder, subtree=",".join(prefixes), is_target=True)
        return added - sum(row.tensor.numel for row in StoredDraft.look(before).draft.rows)
    except DraftQuantError:
        return None
