"""Long texts: features are written as they come and read by blocks; nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.passes import draft_inputs
from draftquant.calibration.recording import continuing
from draftquant.calibration.recording import decoding as kept_rows
from draftquant.calibration.traces import trace_folder
from draftquant.quantize.files import torch_file as mapped_rows
from draftquant.quantize.files.torch_file import SpooledRows, release, row_blocks
from recorded import record_traces
from test_recording_together import NEW, alike, made, prompts

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"


def test_rows_of_a_file_are_given_back_and_read_again(tmp_path: Path) -> None:
    spooled = SpooledRows(tmp_path, 3, torch.bfloat16)
    rows = torch.arange(18.0).view(6, 3)
    spooled.write(4, rows[4:])
    spooled.write(0, rows[:4])
    assert not list(tmp_path.iterdir()), "the file has no name"
    found = spooled.rows(5)
    assert found.dtype is torch.bfloat16
    release(found)
    assert torch.equal(found.float(), rows[:5])
    memory = torch.ones(3)
    release(memory)  # not a file's
    assert memory.tolist() == [1, 1, 1]
    path = tmp_path / "file"
    path.write_bytes(bytes(4) + torch.arange(4.0).numpy().tobytes())
    of_file = mapped_rows.mapped_rows(path, 4, (2, 2), torch.float32)
    assert torch.cat(list(row_blocks(of_file))).tolist() == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="ends inside"):
        mapped_rows.mapped_rows(path, 4, (3, 2), torch.float32)


def as_if_long(patch: pytest.MonkeyPatch) -> None:
    """Every text counts as long, and a few rows as many."""
    for module in (kept_rows, continuing):
        patch.setattr(module, "LONG_TEXT", 1)
    patch.setattr(continuing, "MAX_MASK", 200)
    for other in (mapped_rows, draft_inputs, trace_folder):
        patch.setattr(other, "BLOCK_ROWS", 7)


@pytest.mark.slow
def test_a_text_that_counts_as_long_is_recorded_alike(tmp_path: Path) -> None:
    """In pieces, through a file; together with others; up to the order of sums."""
    target = made(tmp_path / "target")
    asked: dict[str, Any] = {"max_new_tokens": NEW, "aux_layer_ids": (0, 2), "batch_size": 4}
    some = prompts((5, 17, 30, 3, 9))
    whole = list(record_traces(target, some, tmp_path / "whole", **asked))
    with pytest.MonkeyPatch.context() as patch:
        as_if_long(patch)
        read = list(record_traces(target, some, tmp_path / "streamed", **asked))
        alike(read, whole, 1e-5)
        assert [one.features.dtype for one in read] == [one.features.dtype for one in whole]
    names = {path.name for path in (tmp_path / "streamed").iterdir()}
    assert names == {path.name for path in (tmp_path / "whole").iterdir()}
