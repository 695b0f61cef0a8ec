"""Offline data of speculators: a `datasets` folder, and `hidden_states/hs_3.safetensors` of row 3.

    the rows          input_ids, loss_mask, seq_len
    token_ids         [N] int64, equal to the row's input_ids
    hidden_states     [N, m + 1, W], the last slot the output of the last layer, unnormed; of the
                      FP8 backend with scales, as `vllm` reads them

Without the rows, or without pyarrow to read them, nothing says where prompts end.

Source: vllm-project/speculators c05b95b, cli/generate_offline_data.py, train/data.py;
hs-connectors 0.9.0, transfer.py and fp8_hidden_states_connector.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...recipes.errors import TraceError
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import JsonProblem, parse_object
from ..prompts.prompt_file import import_pyarrow
from .samples import Pending, Sample, find_files, make_sample, pending, sample_name
from .vllm import load_states

_STATE = "state.json"


def samples(dump: Path) -> Sequence[Pending]:
    """The texts of a dump, unread."""
    rows = _find_rows(dump)

    def load(file: Path) -> Sample:
        token_ids, states, scales = load_states(file)
        if states.dim() != 3 or states.shape[1] < 2:
            raise TraceError(
                file,
                f"hidden_states: expected [tokens, layers + 1, width], got {list(states.shape)}",
                fix="start vLLM with the ids of the layers and the number of layers, as"
                " launch_vllm.py does",
            )
        return make_sample(
            file,
            sample_name(file, dump),
            token_ids=token_ids,
            answered=rows.loss_mask(_row_of(file), token_ids, file) if rows else None,
            aux=states[:, :-1].flatten(1),
            last=states[:, -1].contiguous(),
            scales=scales,
        )

    written_by = "'speculators generate-offline-data'"
    return pending(find_files(dump, (".safetensors",), written_by=written_by), load)


class _Rows:
    """The rows of a `datasets` folder, read in order; going back begins anew."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self._folder = folder
        self._files = files
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._first = self._stop = 0

    def loss_mask(self, row: int, token_ids: Tensor, file: Path) -> Tensor:
        """The mask [N] of a row, whose tokens must be those of the file."""
        batch = self._batch_of(row)
        found = {name: batch.column(name)[row - self._first].as_py() for name in
                 ("input_ids", "loss_mask")} if batch is not None else {}  # fmt: skip
        if found.get("input_ids") != token_ids.tolist():
            raise TraceError(
                file,
                f"its tokens are not those of row {row} of {self._folder}",
                fix="give the dataset that the hidden states were generated from",
            )
        return torch.tensor(found["loss_mask"])

    def _batch_of(self, row: int) -> Any:
        if row < self._first or self._batch is None:
            self._batches, self._first, self._stop = self._read(), 0, 0
        while row >= self._stop:
            self._batch = next(self._batches, None)
            if self._batch is None:
                return None
            self._first, self._stop = self._stop, self._stop + self._batch.num_rows
        return self._batch

    def _read(self) -> Iterator[Any]:
        pyarrow = import_pyarrow(self._folder)
        for file in self._files:
            try:
                with open_stream(file) as stream, pyarrow.ipc.open_stream(stream) as batches:
                    for batch in batches:
                        if not {"input_ids", "loss_mask"} <= set(batch.schema.names):
                            raise TraceError(file, "has no columns input_ids and loss_mask",
                                             fix="give the folder of prepare-data")  # fmt: skip
                        yield batch
            except (OSError, pyarrow.ArrowException) as exc:
                raise TraceError(file, f"cannot be read as Arrow rows: {exc}",
                                 fix="copy the dataset again")  from exc  # fmt: skip


def _find_rows(dump: Path) -> _Rows | None:
    """The dataset in the dump's folder or the one above; None where there is none."""
    for folder in (dump, dump.parent):
        state = folder / _STATE
        if not state.is_file():
            continue
        try:
            listed = parse_object(read_text(state)).get("_data_files", [])
            files = [folder / Path(entry["filename"]).name for entry in listed]
        except (OSError, JsonProblem, TypeError, KeyError) as exc:
            raise TraceError(state, f"it lists no data files: {exc}",
                             fix="copy the dataset again") from exc  # fmt: skip
        return _Rows(folder, files)
    return None


def _row_of(file: Path) -> int:
    number = file.stem.removeprefix("hs_")
    if not number.isdecimal() or len(number) > 12:
        raise TraceError(file, "expected hs_ROW.safetensors", fix="keep the names of the files")
    return int(number)
