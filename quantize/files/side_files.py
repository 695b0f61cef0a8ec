"""Files beside the tensors: what travels to an output, and the config and index of the output."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .checkpoint import CONFIG_FILE, INDEX_FILE, PROVENANCE_FILE, Checkpoint
from .files_of_folder import looks_like_weights


def check_no_other_weights(folder: Path, files: Sequence[str], *, travel: str, made: str) -> None:
    """No side file holds weights or pickles: the draft's once more, or an optimizer's.

    Args:
        travel: how such weights would come along, for the message.
        made: what becomes of the safetensors, for the message.

    Raises:
        CheckpointError: names the file.
    """
    for file in files:
        if looks_like_weights(file):
            raise CheckpointError(
                folder / file,
                f"weights in another format would travel {travel}",
                fix=f"move this file out of the folder: the safetensors are what is {made}",
            )


def check_not_made(folder: Path, files: Sequence[str], *, cut: bool = False) -> None:
    """No record says that the source was quantized: outputs are made of BF16 drafts.

    Args:
        cut: its draftquant.json says that its vocabulary was cut, and nothing else.

    Raises:
        CheckpointError: names the file.
    """
    if PROVENANCE_FILE in files and not cut:
        raise CheckpointError(
            folder / PROVENANCE_FILE,
            "the source is already the result of a quantization",
            fix="start from the BF16 draft",
        )


def copy_side_files(folder: Path, staging: Path, files: Sequence[str]) -> None:
    """Copy side files byte for byte; `publish` syncs them with all else."""
    for file in files:
        (staging / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / file, staging / file)


def json_texts(documents: Mapping[str, Any]) -> dict[str, str]:
    """File -> its text, of what is to be written as JSON."""
    return {file: json.dumps(content, indent=2) + "\n" for file, content in documents.items()}


def config_and_index(
    source: Checkpoint, config: Mapping[str, Any], files: Mapping[str, str], nbytes: int
) -> dict[str, str]:
    """The text of the index, where the source has one, and of config.json.

    Args:
        files: tensor name -> safetensors file.
    """
    texts: dict[str, str] = {}
    if source.index is not None:
        metadata = {**source.index.get("metadata", {}), "total_size": nbytes}
        index = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
        texts |= json_texts({INDEX_FILE: index})
    texts[CONFIG_FILE] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return texts
