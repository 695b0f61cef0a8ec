"""Pages of hidden states in an engine's cache, and the file that is written of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.vllm import states_file as pages
from draftquant.calibration.vllm.states_file import (
    ExpectedStates,
    Pages,
    StatesHead,
    check_states,
    read_features,
    write_states,
)

HEAD = StatesHead(layer_inputs=(1, 3), engine="vllm 0.32.0")
LAYERS, WIDTH = 2, 8


def cache(blocks: int, rows: int) -> torch.Tensor:
    """Every element another number: [blocks, LAYERS, rows, WIDTH]."""
    count = blocks * LAYERS * rows * WIDTH
    return torch.arange(count, dtype=torch.float32).reshape(blocks, LAYERS, rows, WIDTH)


def test_a_request_is_read_from_its_pages_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_PIECE_BYTES", 200)
    stored = cache(6, 4)
    token_ids = list(range(50, 60))
    write_states(tmp_path / "x.safetensors", Pages(stored, 4), [5, 0, 3], token_ids, HEAD, None)
    expected = torch.cat([stored[b].transpose(0, 1) for b in (5, 0, 3)])[:10].flatten(1)
    assert torch.equal(read_features(tmp_path / "x.safetensors"), expected)
    wanted = ExpectedStates(aux_layer_ids=(0, 2), width=WIDTH, dtype="float32")
    assert check_states(tmp_path / "x.safetensors", wanted, token_ids) == "vllm 0.32.0"
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_schedulers_block_is_several_of_the_cache() -> None:
    """Backends may divide the scheduler's blocks; they lie one after another."""
    stored = cache(8, 2)
    found = Pages(stored, 4).read(Pages(stored, 4).slots([3, 0], 6), None)
    assert torch.equal(found, torch.cat([stored[b].transpose(0, 1) for b in (6, 7, 0)]))
    with pytest.raises(ValueError, match="blocks of 3 tokens are no multiple of the cache's 2"):
        Pages(stored, 3)


def test_a_file_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="9 tokens, but pages for 8"):
        write_states(tmp_path / "x", Pages(cache(4, 4), 4), [1, 2], list(range(9)), HEAD, None)
    monkeypatch.setattr(pages, "_PIECE_BYTES", 1)
    calls: list[Any] = []
    whole = Pages.read

    def broken(self: Pages, slots: torch.Tensor, ready: Any) -> torch.Tensor:
        assert not (tmp_path / "x.safetensors").exists()
        calls.append(slots)
        if len(calls) == 3:
            raise OSError("No space left on device")
        return whole(self, slots, ready)

    monkeypatch.setattr(Pages, "read", broken)
    with pytest.raises(OSError, match="No space left"):
        write_states(
            tmp_path / "x.safetensors", Pages(cache(4, 4), 4), [1, 2], list(range(8)), HEAD, None
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pages_on_a_gpu_are_those_of_the_host(tmp_path: Path) -> None:
    stored = cache(64, 16).to(torch.bfloat16)
    on_device = stored.cuda()
    blocks, token_ids = torch.randperm(64).tolist(), list(range(1000))
    for name, held in (("host", stored), ("device", on_device)):
        found = Pages(held, 16)
        write_states(tmp_path / name, found, blocks, token_ids, HEAD, found.ready())
    assert torch.equal(read_features(tmp_path / "host"), read_features(tmp_path / "device"))
