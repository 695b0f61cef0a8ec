"""`mask_embedding.pt`: a trained embedding of DFlash's mask token, beside the draft's weights.

Engines read the file by this name and use its vector wherever the mask token stands; the row of the
target's embedding is usually untrained.
"""

from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from .....recipes.errors import CheckpointError, short
from ....files.torch_file import TorchFileProblem, load_plain

_MOST_BYTES = 16 * 2**20  # one vector has 100 kB
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_mask_embedding(path: Path, hidden_size: int, mask_token_id: int) -> Tensor:
    """Read the side file: a tensor, or {"embedding": tensor, "mask_token_id": id}.

    Returns:
        [hidden_size], in the dtype of the file.

    Raises:
        CheckpointError: the file is not that, or was made for another mask token or width.

    Source: vLLM 0.33 `_read_mask_embedding`, SGLang 0.5.23 `_maybe_merge_trained_mask_embedding`.
    """

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(path, what, fix="export the draft again, with its mask embedding")

    try:
        state = load_plain(path, most_bytes=_MOST_BYTES)
    except TorchFileProblem as exc:
        raise wrong(f"torch cannot read it as plain tensors: {exc}") from exc
    if isinstance(state, dict):
        token = state.get("mask_token_id", mask_token_id)
        if type(token) is not int or token != mask_token_id:
            raise wrong(f"expected mask_token_id {mask_token_id}, got {_described(token)}")
        if state.get("per_position") is not None and state["per_position"] is not False:
            raise wrong("one embedding per position, which no engine serves")
        state = state.get("embedding")
    if not _is_plain(state):
        raise wrong(f"expected a floating-point 'embedding', got {_described(state)}")
    if state.numel() != hidden_size:
        raise wrong(f"expected {hidden_size} values, got shape {list(state.shape)}")
    if not bool(torch.isfinite(state).all()):
        raise wrong("holds NaN or infinity")
    return state.detach().reshape(-1)


def _is_plain(state: object) -> TypeGuard[Tensor]:
    """True for a dense tensor of floats that every operation of torch takes."""
    return (
        type(state) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(state, torch.Tensor)
        and state.dtype in _DTYPES
        and state.layout is torch.strided
        and not state.is_nested
        and state.device.type == "cpu"
    )


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} of {value.dtype}, {value.layout}, {value.device}"
    return short(value) if isinstance(value, int | str) else type(value).__name__
