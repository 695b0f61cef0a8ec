"""The layers of DFlash and related families, as engines serve them.

Sources: vLLM 0.33 `qwen3_dflash.py`, SGLang 0.5.23 `dflash.py`, z-lab `dflash/model.py`.
"""

from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ....recipes.errors import CheckpointError
from ..family import Weights
from ..forward import Attend, OnInput
from ..geometry import RotatedGeometry, TokenLimit, needed_mask
from ..maths import Tensor, embedding, torch
from ..passes import BlockForward
from .layers import LayersForward


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashGeometry(RotatedGeometry):
    """Config of a DFlash draft; widths in elements.

    Attributes:
        aux_layer_ids: `target_layer_ids`, 0-based, after the layer, ascending.
        layer_types: attention of every layer, None = all full.
        sliding_window: positions that a sliding layer sees, including its own.
        causal: inside the block; None = full layers in both directions, sliding layers causal.
        proposes_from_anchor: a slot predicts the token after it, so the anchor's slot predicts the
            first; otherwise it predicts the token in its own place, and the anchor's slot nothing.
    """

    aux_layer_ids: tuple[int, ...]
    block_size: int  # pyright: ignore[reportGeneralTypeIssues]  # it must be given here
    layer_types: tuple[str, ...] | None
    sliding_window: int | None
    causal: bool | None
    proposes_from_anchor: bool = False

    @property
    @override
    def most_draft_tokens(self) -> int:
        return self.block_size - (not self.proposes_from_anchor)

    @property
    @override
    def token_limit(self) -> TokenLimit:
        given = "" if self.proposes_from_anchor else ", and the first of them is given"
        return TokenLimit(
            self.most_draft_tokens, f"the draft fills blocks of {self.block_size} tokens{given}"
        )

    def is_sliding(self, layer: int) -> bool:
        """True if a layer sees only a window of the context."""
        return self.layer_types is not None and self.layer_types[layer] == "sliding_attention"

    @override
    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.is_sliding(layer) else None

    def is_causal(self, layer: int) -> bool:
        """True if a slot sees no slot after it.

        Source: vLLM 0.33 `_dflash_layer_causal`; SGLang 0.5.23 `_get_dflash_layer_attention_params`
        is the same except that it does not read `dflash_config.causal`.
        """
        return self.is_sliding(layer) if self.causal is None else self.causal


class DFlashForward(LayersForward, BlockForward):
    """One DFlash draft.

    A block is [anchor, mask x K] at positions n .. n + K, without its last mask where the anchor's
    slot proposes the first token; the context is the positions before n.
    Every layer projects the same fused rows to its context keys and values, without its
    input_layernorm, with the same linears that project the block: quantized ones read both. Both
    engines write a block's own keys to the cache before they attend, as they do for the context.
    """

    geometry: DFlashGeometry

    def __init__(self, geometry: DFlashGeometry, weights: Weights, on_input: OnInput) -> None:
        super().__init__(geometry, weights, on_input)
        self.mask_token_id = needed_mask(geometry)

    @override
    def fuse(self, features: Tensor) -> Tensor:
        # c_t = hidden_norm(fc(features)).
        return self.norm("hidden_norm", self.linear("fc", features))

    @override
    def context(self, layer: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention.keys_values(layer, rows, positions, self)

    @override
    def block(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        given = token_ids[:, int(self.geometry.proposes_from_anchor) :]  # of the anchor and masks
        masks = torch.full_like(given[:, 1:], self.mask_token_id)
        slots = positions[:, None] + torch.arange(given.shape[1], device=positions.device)
        x = self._embed(torch.cat((token_ids[:, :1], masks), dim=1))
        for layer in range(self.geometry.num_layers):
            x = self.layer(layer, x, slots, attend)
        return self.proposing(x, token_ids)

    def proposing(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """What `logits` predicts from, [A, K, W'], given all slots before the last norm."""
        return x[:, 1 - token_ids.shape[1] :]

    @override
    def visible(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        # A window counts the query's own position. Source: vLLM 0.33 `flash_attn.py`: (window - 1,
        # 0) if causal, else (window - 1, window - 1).
        behind = queries - keys
        seen = behind >= 0 if self.geometry.is_causal(layer) else torch.ones_like(behind).bool()
        if (window := self.geometry.window_of(layer)) is not None:
            seen = seen & (behind.abs() < window)
        return seen

    @override
    def sinks(self, layer: int) -> Tensor | None:
        # Engines scale the scores, not these. Source: `sinks=` of both; the kernels that take them.
        return self.weights.get(f"layers.{layer}.self_attn.attention_sink_bias")

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings; a trained mask embedding replaces the row of the mask token."""
        dtype = self.weights["norm.weight"].dtype
        embedded = embedding(token_ids, self.weights["embed_tokens.weight"], dtype)
        if "mask_embedding" not in self.weights:
            return embedded
        is_mask = (token_ids == self.mask_token_id)[..., None]
        return torch.where(is_mask, self.weights["mask_embedding"], embedded)


_MOST_BYTES = 16 * 2**20  # one vector has 100 kB


def read_mask_embedding(path: Path, hidden_size: int, mask_token_id: int) -> Tensor:
    """Read `mask_embedding.pt`: a tensor, or {"embedding": tensor, "mask_token_id": id}.

    Engines use the vector [hidden_size] for every mask token; the row of the target's
    embedding is usually untrained.

    Source: vLLM 0.33 `_read_mask_embedding`, SGLang 0.5.23 `_maybe_merge_trained_mask_embedding`.
    """
    from ...files.torch_file import TorchFileProblem, load_plain  # imports torch

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(path, what, fix="export the draft again, with its mask embedding")

    try:
        state = load_plain(path, most_bytes=_MOST_BYTES)
    except TorchFileProblem as exc:
        raise wrong(f"torch cannot read it as plain tensors: {exc}") from exc
    if isinstance(state, dict):
        token = state.get("mask_token_id", mask_token_id)
        if type(token) is not int or token != mask_token_id:
            told = token if isinstance(token, int) else type(token).__name__
            raise wrong(f"expected mask_token_id {mask_token_id}, got {told}")
        if state.get("per_position") is not None and state["per_position"] is not False:
            raise wrong("one embedding per position, which no engine serves")
        state = state.get("embedding")
    if (
        not isinstance(state, torch.Tensor)
        or state.layout is not torch.strided
        or (state.is_nested or state.is_meta)
        or not (state.is_floating_point() and state.dtype.itemsize > 1)  # no FP8
    ):
        raise wrong(f"expected a floating-point 'embedding', got {type(state).__name__}")
    if state.numel() != hidden_size:
        raise wrong(f"expected {hidden_size} values, got shape {list(state.shape)}")
    if not bool(torch.isfinite(state).all()):
        raise wrong("holds NaN or infinity")
    vector: Tensor = state.detach().reshape(-1)
    return vector
