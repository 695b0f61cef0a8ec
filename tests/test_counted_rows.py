"""Behind a proposal that is wrong nothing is computed, and what counts is the same, for every kind.

Random drafts are right about nothing. Their tokens are therefore read modulo 2 here, so that half
of the proposals are right by chance, and every number of accepted tokens occurs.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.passes import proposals as counted_rows
from draftquant.calibration.passes.proposals import NOTHING, Proposals, batch_proposals
from draftquant.quantize.drafts import maths
from draftquant.quantize.drafts.forward import DraftForward
from draftquant.quantize.drafts.passes import ChainForward
from draftquant.quantize.stored.loading import load_draft
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from tiny_llama import tiny_language_model, with_mask_hidden
from tiny_mla import tiny_eagle3_mla
from tiny_mtp import tiny_mimo_mtp, tiny_step3p5_mtp
from torch import Tensor

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

K, NUM_TOKENS, VOCAB = 3, 40, 96
COUNTED = (range(4, 30), range(2, 36), range(9, 9))
"""Rows of three sequences: of answers that begin and end at other places, and of a short one."""

KINDS: Mapping[str, Callable[[Path], Path]] = {
    "eagle3": tiny_eagle3_llama,
    "mla": tiny_eagle3_mla,
    "peagle": lambda folder: with_mask_hidden(tiny_eagle3_llama(folder)),
    "mtp": tiny_mimo_mtp,
    "modules": tiny_step3p5_mtp,
    "text": tiny_language_model,
    "dflash": tiny_dflash,
    "dflash2": lambda folder: tiny_dflash(folder, kind="dflash2"),
    "dspark": tiny_dspark,
}


def shared(hidden: int = 64) -> dict[str, Tensor]:
    generator, names = torch.Generator().manual_seed(1), ("embed_tokens.weight", "lm_head.weight")
    return {name: torch.randn((VOCAB, hidden), generator=generator) for name in names}


class Run:
    """A draft and random text: what it proposes, and how many rows it multiplied for that."""

    def __init__(self, folder: Path, to_target: Callable[[Tensor], Tensor]) -> None:
        self.rows = {"layers": 0, "head": 0}
        draft = load_draft(folder, dtype=torch.float64, shared=shared(), on_input=self._seen)
        self.forward: DraftForward = draft.forward
        self.forward.to_target = to_target  # type: ignore[method-assign]
        generator = torch.Generator().manual_seed(5)
        features = (3, NUM_TOKENS - 1, draft.geometry.hidden_size)
        self.hidden = torch.randn(features, generator=generator, dtype=torch.float64)
        self.token_ids = torch.randint(2, (3, NUM_TOKENS), generator=generator)

    def _seen(self, name: str, x: Tensor) -> Tensor:
        if "head" in name and "attn" not in name and "markov" not in name:
            self.rows["head"] += x.shape[:-1].numel()
        elif "o_proj" in name:
            self.rows["layers"] += x.shape[:-1].numel()
        return x

    def proposals(self, *, counted: bool, temperature: float | None = None) -> Proposals:
        self.rows.update(layers=0, head=0)
        of: dict[str, Any] = {"rows": range(2, 36), "num_draft_tokens": K, "block_rows": 16}
        of |= {"counted": COUNTED if counted else None, "temperature": temperature}
        return batch_proposals(self.forward, self.hidden, self.token_ids, **of)


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return Run(KINDS[request.param](tmp_path / request.param), lambda ids: ids % 2)


def test_what_counts_is_equal_and_alone_computed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_rows, "FEWEST_ROWS", 2)
    every = run.proposals(counted=False).token_ids
    all_rows = dict(run.rows)
    found = run.proposals(counted=True).token_ids
    outcomes, alive = set(), [0] * (K + 1)
    for i, own in enumerate(COUNTED):
        for row in range(2, 36):
            mine, whole = found[i, row - 2].tolist(), every[i, row - 2].tolist()
            recorded = run.token_ids[i, row + 2 : row + 2 + K].tolist()
            accepted = [*[a == b for a, b in zip(whole, recorded, strict=True)], False].index(False)
            reached = min(accepted + 1, K) if row in own else 0
            assert mine == whole[:reached] + [NOTHING] * (K - reached)
            for depth in range(reached):
                alive[depth] += 1
            outcomes |= {accepted} if row in own else set()
    assert outcomes == {0, 1, 2, 3}
    assert all_rows["head"] == 3 * 34 * K
    few = 9 * K * 2  # of each of at most 9 blocks and each depth, filled up
    assert sum(alive) <= run.rows["head"] <= sum(alive) + few < all_rows["head"]
    share = run.rows["layers"] / all_rows["layers"]
    assert share < 0.8 if isinstance(run.forward, ChainForward) else share == 1


def test_of_equal_logits_the_first_and_of_nan_nothing_is_hidden() -> None:
    x, weight = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [0.0], [2.0], [1.0]])
    x[1] = -1
    for most in (15, 6, 3):
        top, ids = maths.largest_of([(x, weight)], most)
        assert (top.tolist(), ids.tolist()) == ([2, 0, 2], [1, 2, 1])
        top, ids = maths.largest_of([(x, weight), (x, weight)], most)
        assert (top.tolist(), ids.tolist()) == ([4, 0, 4], [1, 2, 1])
        for at in range(5):
            broken = weight.clone()
            broken[at] = math.nan
            assert maths.largest_of([(x, broken)], most)[0].isnan().all()
