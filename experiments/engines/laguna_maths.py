"""What vLLM 0.33's own DFlashLagunaForCausalLM computes, in float32 on a CPU: `laguna_maths.json`.

The class, its config and loader are vLLM's. What stands in for its kernels says in plain torch what
each computes: norms, the rotation of halves, the cache, and the softmax over it.
Usage: `experiments/run laguna_maths`.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import torch  # noqa: E402
from k3_draft import CONTEXT, TOKENS, features  # noqa: E402
from k3_maths import norm, write_logits  # noqa: E402
from laguna_draft import CASES, write_draft  # noqa: E402
from torch import Tensor, nn  # noqa: E402


def main() -> None:
    """Write the logits of every case."""
    write_logits(CASES, write_draft, logits, HERE / "laguna_maths.json")


def logits(model: Any, table: Tensor) -> Tensor:
    """[K, vocabulary] of a block after a context, as `dflash/speculator.py` asks for them."""
    import vllm.model_executor.models.laguna_dflash as laguna
    import vllm.model_executor.models.qwen3_dflash as dflash

    laguna.ops = dflash.ops = SimpleNamespace(
        rms_norm=lambda out, x, weight, eps: out.copy_(norm(x, _by_layer(weight, x), eps)),
        rotary_embedding=lambda at, x, _none, size, angles, _neox: x.copy_(
            turned(x.view(len(x), -1, size), at, angles).flatten(1)
        ),
    )
    causal, cache = not dflash.dflash_has_any_non_causal(model.config), {}
    for layer in model.model.layers:
        attention = layer.self_attn
        angles = attention.rotary_emb  # which holds them in BF16
        angles.cos_sin_cache = angles._compute_cos_sin_cache()
        attention.attn.impl.do_kv_cache_update = lambda own, k, v, *_: cache.update({own: (k, v)})
        attention.attn.forward = attending(attention, cache, causal)
    model.model.embed_tokens = nn.Embedding.from_pretrained(table)
    model.model._build_fused_kv_buffers()
    context = model.combine_hidden_states(features(3 * table.shape[1]))
    at = torch.arange(CONTEXT)
    model.precompute_and_store_context_kv(context, at, at)
    count = len(TOKENS)
    masks = [model.model.mask_token_id] * (count - 1)
    places = torch.arange(CONTEXT, CONTEXT + count)
    return model(torch.tensor([TOKENS[0], *masks]), places)[1:] @ table.T


def _by_layer(weight: Tensor, x: Tensor) -> Tensor:
    return weight.view(len(weight), *[1] * (x.dim() - 2), -1)


def attending(attention: Any, cache: dict[Any, tuple[Tensor, Tensor]], causal: bool) -> Any:
    """Softmax over the context's keys and the block's, within the window."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [x.view(len(x), -1, attention.head_dim) for x in (q, k, v)]
        keys, values = (
            torch.cat(pair).repeat_interleave(heads[0].shape[1] // heads[1].shape[1], dim=1)
            for pair in zip(cache[attention.attn], heads[1:], strict=True)
        )
        scores = torch.einsum("shd,thd->hst", heads[0], keys) * attention.scaling
        behind = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
        seen = behind >= 0 if causal else torch.ones_like(behind).bool()
        if attention.sliding_window is not None:
            seen &= behind.abs() < attention.sliding_window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hst,thd->shd", weights, values).flatten(1)

    return forward


def turned(x: Tensor, at: Tensor, angles: Tensor) -> Tensor:
    """Halves of [N, H, D] turned by the rows `at` of [P, D], cosines before sines."""
    cos, sin = angles[at][:, None].chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


if __name__ == "__main__":
    main()
