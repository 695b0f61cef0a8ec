"""Long texts: features are written as they come and read by blocks; nothing else changes."""

from pathlib import Path

import pytest
import torch
from draftquant.quantize.files import torch_file as mapped_rows
from draftquant.quantize.files.torch_file import SpooledRows, release, row_blocks

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
