"""JSON files beside config.json: ModelOpt's own declaration, and the index of the shards."""

from pathlib import Path
from typing import Any

from ...errors import CheckpointError, VerifyError
from ...files.checkpoint import INDEX_FILE, Checkpoint, read_json_object
from ...layouts import get_layout
from ...stored.declarations import HF_QUANT_CONFIG
from ...stored.declarations.modelopt import check_side_file
from ...verify.headers import index_faults
from .declaration import strictly_read, understood
from .repair import Outcome, Repair


def repair_side_file(checkpoint: Checkpoint) -> Outcome:
    """hf_quant_config.json says what config.json says: TensorRT-LLM reads it first."""
    found = understood(checkpoint)
    if found is None or found.layout != "modelopt":
        return Outcome(checkpoint=checkpoint)
    try:
        scheme = strictly_read(checkpoint)
    except VerifyError:  # its excludes, which were left: there is nothing to agree with
        return Outcome(checkpoint=checkpoint)
    path = checkpoint.folder / HF_QUANT_CONFIG
    wrong = None if path.is_file() else "it is missing: TensorRT-LLM reads it"
    try:
        check_side_file(checkpoint, scheme, found.value["quant_algo"])
    except (CheckpointError, VerifyError) as exc:
        wrong = exc.what
    if wrong is None:
        return Outcome(checkpoint=checkpoint)
    declared = {**found.value, "exclude_modules": list(scheme.excludes)}
    files: dict[str, Any] = dict(get_layout("modelopt").side_files(declared))
    producer = _producer(path) or found.value.get("producer")
    if producer:
        files[HF_QUANT_CONFIG] = {**files[HF_QUANT_CONFIG], "producer": producer}
    change = Repair(
        name="side-file",
        wrong=f"{HF_QUANT_CONFIG}: {wrong}",
        written="the declaration of config.json in ModelOpt's nested form",
    )
    return Outcome(checkpoint=checkpoint, repairs=(change,), files=files)


def _producer(path: Path) -> Any:
    """Who made hf_quant_config.json, by its own word; None where it says nothing readable."""
    try:
        return read_json_object(path, "export it again").get("producer")
    except CheckpointError:
        return None


def repair_index(checkpoint: Checkpoint) -> Outcome:
    """`metadata.total_size` of the index counts tensor data; Quark 0.13 counts headers too."""
    if not index_faults(checkpoint) or checkpoint.index is None:
        return Outcome(checkpoint=checkpoint)
    metadata = {**checkpoint.index.get("metadata", {}), "total_size": checkpoint.nbytes}
    said = checkpoint.index.get("metadata", {}).get("total_size")
    change = Repair(
        name="index",
        wrong=f"{INDEX_FILE}: total_size is {said!r}, the tensors have {checkpoint.nbytes} bytes",
        written=f"total_size: {checkpoint.nbytes}",
    )
    files = {INDEX_FILE: {**checkpoint.index, "metadata": metadata}}
    return Outcome(checkpoint=checkpoint, repairs=(change,), files=files)
