"""`mask_embedding.pt`: a trained embedding of DFlash's mask token, beside the draft's weights.

Engines read the file by this name and use its vector wherever the mask token stands; the row of the
target's embedding is usually untrained.
"""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError


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
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError,
            AttributeError, EOFError, ImportError, IndexError) as exc:  # fmt: skip
        reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        raise wrong(f"torch cannot read it as plain tensors: {reason}") from exc
    if isinstance(state, dict):
        token = state.get("mask_token_id", mask_token_id)
        if token != mask_token_id:
            raise wrong(f"expected mask_token_id {mask_token_id}, got {token!r}")
        if state.get("per_position"):
            raise wrong("one embedding per position, which no engine serves")
        state = state.get("embedding")
    if not isinstance(state, torch.Tensor) or not state.is_floating_point():
        raise wrong(f"expected a floating-point 'embedding', got {type(state).__name__}")
    if state.numel() != hidden_size:
        raise wrong(f"expected {hidden_size} values, got shape {list(state.shape)}")
    if not bool(torch.isfinite(state).all()):
        raise wrong("holds NaN or infinity")
    return state.reshape(-1)
