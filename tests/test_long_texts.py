"""Long texts: features are written as they come and read by blocks; nothing else changes."""

from pathlib import Path

import pytest
import torch
from draftquant.calibration.recording import decoding
from draftquant.quantize.files import mapped_rows
from draftquant.quantize.files.mapped_rows import SpooledRows, release, row_blocks


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


def test_features_of_prompt_and_answer_come_back_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "LONG_TEXT", 5)
    kinds = {"dtype": torch.float32, "stored": torch.float32, "device": torch.device("cpu")}
    kept = decoding.KeptOutputs(1, 6, width=2, spec=None, fuse=None, spool=tmp_path, **kinds)
    features, top1 = torch.arange(12.0).view(6, 2), torch.arange(6)
    kept.read(0, 0, features[:3], top1[:3])
    kept.run(torch.tensor([0]), torch.tensor([3]), features[3:4], top1[3:4])
    (left,) = kept.leave([0], [slice(2, 4)])
    assert torch.equal(left["features"], features[:4])
    assert left["target_top1"].tolist() == [0, 1, 2, 3]
