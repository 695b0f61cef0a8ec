"""JSON files beside config.json: ModelOpt's own declaration, and the index of the shards."""

from pathlib import Path
from typing import Any

from ...errors import CheckpointError, VerifyError
from ...files.checkpoint import INDEX_FILE, Checkpoint, read_json_object
from ...layouts import get_layout
from .flat_declaration import strictly_read, understood
from .repair import Outcome, Repair


def repair_side_file(checkpoint: Checkpoint) -> Outcome:
    """hf_quant_config.json says what config.json says: TensorRT-LLM reads it first."""
    found = understood(checkpoint)
    side_file = found.scheme.layout.side_file if found else None
    if found is None or side_file is None:
        return Outcome(checkpoint=checkpoint)
    try:
        scheme = strictly_read(checkpoint)
    except VerifyError:  # its excludes, which were left: there is nothing to agree with
        return Outcome(checkpoint=checkpoint)
    path = checkpoint.folder / side_file.name
    wrong = None if path.is_file() else "it is missing: TensorRT-LLM reads it"
    try:
        side_file.check(checkpoint.folder, scheme, found.value)
    except (CheckpointError, VerifyError) as exc:
        wrong = exc.what
    if wrong is None:
        return Outcome(checkpoint=checkpoint)
    declared = {**found.value, "exclude_modules": list(scheme.excludes)}
    files: dict[str, Any] = dict(get_layout(found.layout).side_files(declared))
    producer = _producer(path) or found.value.get("producer")
    if producer:
        files[path.name] = {**files[path.name], "producer": producer}
    change = Repair(
        name="side-file",
        wrong=f"{path.name}: {wrong}",
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
    if checkpoint.index is None:
        return Outcome(checkpoint=checkpoint)
    before = checkpoint.index.get("metadata", {})
    said = before.get("total_size")
    if type(said) is int and said == checkpoint.nbytes:
        return Outcome(checkpoint=checkpoint)
    metadata = {**before, "total_size": checkpoint.nbytes}
    change = Repair(
        name="index",
        wrong=f"{INDEX_FILE}: total_size is {said!r}, the tensors have {checkpoint.nbytes} bytes",
        written=f"total_size: {checkpoint.nbytes}",
    )
    files = {INDEX_FILE: {**checkpoint.index, "metadata": metadata}}
    return Outcome(checkpoint=checkpoint, repairs=(change,), files=files)
