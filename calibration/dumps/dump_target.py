"""What an import knows of the target without running it."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quantize.errors import CheckpointError
from ...quantize.files.checkpoint import CONFIG_FILE, read_json_object
from ...recipes.errors import visible
from ..errors import TraceError
from ..recording.target_shape import end_token_ids
from ..traces.manifest import TargetIdentity
from ..traces.target_tables import FINAL_NORM, TargetTables
from ..traces.trace_folder import file_sha256

RUNNABLE_SHARE = 0.4
"""Of the memory: larger weights are not loaded to recompute a few positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """A target's folder, which may hold its config alone.

    Attributes:
        identity: weights_sha256 is None, nothing has read the weights.
        width: W, of its hidden states.
        ends: tokens that end a text.
        tables: None where embedding and head are not in the folder; `without_tables` says why.
        not_run: why it is not run here; None where it can be.
    """

    folder: Path
    identity: TargetIdentity
    width: int
    ends: Collection[int]
    tables: TargetTables | None
    without_tables: str
    not_run: str | None

    @property
    def has_head(self) -> bool:
        """Whether head and last norm are at hand."""
        return self.tables is not None and FINAL_NORM in self.tables.shared()


def read_target(folder: Path) -> TargetFacts:
    """Read config.json, headers of weights, and what ends a text.

    Raises:
        TraceError: there is no config.json with the number of layers, the width and the vocabulary.
    """
    config = _object(folder / CONFIG_FILE)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    numbers = []
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        value = text.get(key)
        if type(value) is not int or value < 1:
            raise TraceError(folder / CONFIG_FILE, f"{key}: expected a whole number of at least 1",
                             fix="give the folder of the target that was dumped")  # fmt: skip
        numbers.append(value)
    tables, without_tables = None, ""
    try:
        tables = TargetTables.find(folder)
    except CheckpointError as exc:
        without_tables = f"{exc.where}: {exc.what}"
    try:
        ends = end_token_ids(folder)
    except CheckpointError as exc:
        raise TraceError(exc.where, exc.what, fix=exc.fix) from exc
    return TargetFacts(
        folder=folder,
        identity=TargetIdentity(
            name=visible(folder.resolve().name),
            config_sha256=file_sha256(folder / CONFIG_FILE),
            weights_sha256=None,
            num_layers=numbers[0],
            vocab_size=numbers[2],
        ),
        width=numbers[1],
        ends=ends,
        tables=tables,
        without_tables=without_tables,
        not_run=_not_run(folder),
    )


def _not_run(folder: Path) -> str | None:
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not sizes:
        return "its folder holds no weights"
    if sum(sizes) > RUNNABLE_SHARE * memory:
        return f"its {sum(sizes) / 1e9:,.0f} GB do not fit into {memory / 1e9:,.0f} GB of memory"
    return None


def _object(path: Path) -> Mapping[str, Any]:
    try:
        return read_json_object(path, "give the folder of the target that was dumped")
    except CheckpointError as exc:
        raise TraceError(exc.where, exc.what, fix=exc.fix) from exc
