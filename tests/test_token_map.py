"""SGLang's token map: the file, and what is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from draftquant.quantize.engines import check_draft
from draftquant.quantize.errors import CheckpointError, OutputError
from draftquant.quantize.vocabulary import token_map
from draftquant.quantize.vocabulary.token_map import read_token_map, write_token_map

ENGINES = Path(__file__).parent / "engines"
sys.path.append(str(ENGINES))  # its modules stand alone

from proposals import states, target_table  # noqa: E402

sys.path.remove(str(ENGINES))
from engines.token_map import EAGLE1, HIDDEN, VOCAB, builders  # noqa: E402
from engines.token_map import IDS as LISTED  # noqa: E402

IDS = (0, 3, 4, 31)
CLOSE = 0.05
"""Of logits of the same row, computed in BF16 and in float32."""


def as_sglang(path: Path) -> torch.Tensor:
    """`load_token_map` of `sglang/srt/speculative/spec_utils.py:818`, 0.5.23."""
    return torch.as_tensor(torch.load(path, weights_only=True), dtype=torch.int64)


def test_the_engine_reads_the_ids_themselves(tmp_path: Path) -> None:
    write_token_map(tmp_path / "map.pt", IDS, vocab_size=32)
    write_token_map(tmp_path / "other", IDS, vocab_size=32)
    assert as_sglang(tmp_path / "map.pt").tolist() == list(IDS)
    assert read_token_map(tmp_path / "map.pt", vocab_size=32) == IDS
    assert (tmp_path / "map.pt").read_bytes() == (tmp_path / "other").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.pt", "other"]
    with pytest.raises(OutputError, match="never overwritten"):
        write_token_map(tmp_path / "map.pt", IDS, vocab_size=32)


def test_a_list_is_a_token_map_too(tmp_path: Path) -> None:
    torch.save(list(IDS), tmp_path / "list.pt")
    assert read_token_map(tmp_path / "list.pt", vocab_size=32) == IDS


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ((), "names no token"),
        ((0, 32), "target id 32 lies outside the vocabulary of 32"),
        ((-1, 2), "target id -1 lies outside"),
        ((0, 3, 3), "got 3 after 3"),
        ((4, 3), "got 3 after 4"),
    ],
)
def test_ids_that_are_none(tmp_path: Path, ids: tuple[int, ...], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        write_token_map(tmp_path / "map.pt", ids, vocab_size=32)
    torch.save(list(ids), tmp_path / "read.pt")
    with pytest.raises(CheckpointError, match=said):
        read_token_map(tmp_path / "read.pt", vocab_size=32)
    assert [path.name for path in tmp_path.iterdir()] == ["read.pt"]


@pytest.mark.parametrize("saved", [torch.rand(3), torch.zeros(2, 2, dtype=torch.int64), {"a": 1}])
def test_files_that_are_none(tmp_path: Path, saved: object) -> None:
    torch.save(saved, tmp_path / "map.pt")
    with pytest.raises(CheckpointError, match="expected one list of target ids"):
        read_token_map(tmp_path / "map.pt", vocab_size=32)


def test_no_torch_file(tmp_path: Path) -> None:
    (tmp_path / "map.pt").write_bytes(b"0 3 4 31")
    with pytest.raises(CheckpointError, match="expected a token map"):
        read_token_map(tmp_path / "map.pt", vocab_size=32)


def test_what_reads_back_otherwise_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_map, "read_token_map", lambda *_, **__: (1, 2))
    with pytest.raises(OutputError, match="reads back as other ids"):
        write_token_map(tmp_path / "map.pt", IDS, vocab_size=32)
    assert not list(tmp_path.iterdir())


EXECUTED = json.loads((ENGINES / "token_map.json").read_text(encoding="utf-8"))
"""What SGLang's own workers proposed: `engines/token_map.py`."""


@pytest.mark.parametrize("name", ["EAGLE-1", "MiMo MTP"])
def test_the_engine_proposes_the_best_of_the_listed_rows(name: str) -> None:
    logits = states(HIDDEN).float() @ target_table(VOCAB, HIDDEN).float().T
    for rows, said in ((list(range(VOCAB)), "without"), (list(LISTED), "with")):
        tokens = EXECUTED[name][said]
        assert set(tokens) <= set(rows)
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits[:, rows].amax(-1) - chosen <= CLOSE).all()
    assert not set(EXECUTED[name]["without"]) <= set(LISTED)


def test_where_the_engine_cuts_no_head() -> None:
    """EAGLE-3 ignores the map; a language model keeps its own head, whose rows it does not list."""
    assert EXECUTED["EAGLE-3"]["with"] == EXECUTED["EAGLE-3"]["without"]
    assert "IndexError" in EXECUTED["language model"]["with"]
    assert "IndexError" in EXECUTED["EAGLE-1 on 2 GPUs"]["with"]


def test_check_names_the_option(tmp_path: Path) -> None:
    draft = builders()["tiny_eagle1"](tmp_path / "eagle1", fc_bias=True, config=EAGLE1)
    (said,) = (n for n in check_draft(draft, engine="sglang").notes if "token-map" in n)
    assert "on one GPU" in said
    assert not any("token-map" in note for note in check_draft(draft, engine="vllm").notes)
