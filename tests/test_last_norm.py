"""The norm before a target's head, told from what the target wrote."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from draftquant.calibration.recording.decoding import GREEDY, Decoding
from draftquant.calibration.vllm.vllm_recording import LastNorm, Written, shown_norm
from draftquant.recipes.errors import TraceError
from tiny import Stored, store, write_tensors

VOCAB, WIDTH, EPS = 40, 16, 1e-5
CHANCE = np.random.default_rng(0)
HEAD = CHANCE.normal(size=(VOCAB, WIDTH))
NORM = 1 + 0.3 * CHANCE.normal(size=WIDTH)
STATES = 4 * CHANCE.normal(size=(30, WIDTH))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text('{"text_config": {"rms_norm_eps": 1e-5}}', encoding="utf-8")
    put(folder, NORM)
    return folder


def put(folder: Path, norm: Sequence[float] | None) -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tensors: dict[str, Stored] = {name: store(HEAD, "F32") for name in names}
    if norm is not None:
        tensors["model.norm.weight"] = store(np.asarray(norm), "F32")
    write_tensors(folder, tensors)


def behind(scale: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return STATES / np.sqrt((STATES**2).mean(-1, keepdims=True) + EPS) * scale  # type: ignore[no-any-return]


def written(scale: np.ndarray, temperature: float = 1.0) -> list[Written]:  # type: ignore[type-arg]
    """Three texts of a target whose norm multiplies by `scale`."""
    logits = behind(scale) @ HEAD.T / temperature
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = logits.argmax(-1) if temperature == 1 else CHANCE.integers(VOCAB, size=len(logits))
    own = np.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return [
        Written(
            states=torch.tensor(STATES[rows], dtype=torch.float32),
            token_ids=torch.tensor(tokens[rows]),
            logprob=torch.tensor(own[rows], dtype=torch.float32),
        )
        for rows in (slice(0, 1), slice(1, 20), slice(20, 30))
    ]


@pytest.mark.parametrize(("temperature", "less_one"), [(1.0, True), (0.7, False)])
def test_probabilities_tell_either_norm(target: Path, less_one: bool, temperature: float) -> None:
    put(target, NORM - less_one)
    decoding = GREEDY if temperature == 1 else Decoding(temperature=temperature)
    norm = shown_norm(target, written(NORM, temperature), decoding)
    torch.testing.assert_close(norm.scale, torch.tensor(NORM, dtype=torch.float32))
    found = norm(torch.tensor(STATES, dtype=torch.float32))
    np.testing.assert_allclose(found.numpy(), behind(NORM), rtol=1e-5, atol=1e-6)


def test_something_else_before_the_head_is_refused(target: Path) -> None:
    with pytest.raises(TraceError, match="something else than a norm stands between its"):
        shown_norm(target, written(0.5 * NORM), GREEDY)
    put(target, None)
    with pytest.raises(TraceError, match=r"no norm\.weight beside its embedding"):
        shown_norm(target, written(NORM), GREEDY)
    norm = LastNorm(scale=torch.full((2,), 3.0), eps=0.0)
    assert norm(torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)).dtype == torch.bfloat16
