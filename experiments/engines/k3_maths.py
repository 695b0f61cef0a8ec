"""What vLLM 0.33's own K3DSparkForCausalLM computes, in float32 on a CPU: `k3_maths.json`.

The class, its config, loader, absorption of kv_b_proj and Markov head are vLLM's. Its kernels are
not there: what stands in for them says in plain torch what each computes. They are the norms of
latents, the rotation of neighbouring pairs, the latent cache, and the softmax over it.
Usage: `experiments/run k3_maths`.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import torch  # noqa: E402
from k3_draft import CASES, CONTEXT, TOKENS, features, write_draft  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Latents = dict[str, Tensor]


def main() -> None:
    """Write the logits of every case."""
    write_logits(CASES, write_draft, logits, HERE / "k3_maths.json")


def write_logits(
    cases: Iterable[str],
    write_draft: Callable[[Path, str], Path],
    logits: Callable[[Any, Tensor], Tensor],
    file: Path,
) -> None:
    """Load the draft of every case, and write what `logits` makes of its model."""
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR")
    import vllm_loader
    import vllm_platform
    from asking import write_table, write_target

    vllm_platform.install("sm90")
    vllm_platform.stand_on_cpu()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_target(Path(folder) / "target")
        for case in cases:
            draft = write_draft(Path(folder) / case, case)
            subject = vllm_loader.subject(draft, Path(folder) / "target")
            with subject.context, torch.no_grad():
                model: Any = subject.build()
                subject.load_folder(model)
                for step in subject.last_steps(model).values():
                    step()
                table = subject.tensors["embed_tokens.weight"].float()
                found[case] = logits(model.float(), table)[:, :24].tolist()
    write_table(file, found)


def logits(model: Any, table: Tensor) -> Tensor:
    """[K, vocabulary] of a block after a context, as `dspark/speculator.py` asks for them."""
    import vllm.models.kimi_k3.nvidia.dspark_mla as dspark
    import vllm.models.kimi_k3.nvidia.mla as mla
    from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal

    cache: Latents = {}
    names = [layer.self_attn.layer_name for layer in model.model.layers]
    causal = not dflash_has_any_non_causal(model.config)
    dspark.ops = SimpleNamespace(
        rms_norm=lambda out, x, weight, eps: out.copy_(norm(x, weight[:, None], eps)),
        rotary_embedding=lambda at, x, _none, _size, angles, _neox: x.copy_(turned(x, at, angles)),
        concat_and_cache_mla_grouped=lambda c, r, *_: cache.update(
            zip(names, torch.cat((c, r), dim=-1), strict=True)
        ),
    )
    count = len(TOKENS) - 1
    torch.cuda.is_current_stream_capturing = lambda: False
    work = SimpleNamespace(get_simultaneous=lambda *_: (torch.empty(10**5, dtype=torch.int64),))
    dspark.current_workspace_manager = lambda: work
    mla.fused_q_kv_rmsnorm = lambda q, c, by_q, by_c, eps: (norm(q, by_q, eps), norm(c, by_c, eps))
    mla.fused_mla_decode_q_concat_kv_cache_insert = query_and_cache
    about = SimpleNamespace(num_actual_tokens=count, num_decode_tokens=count)
    slots = {name: torch.arange(count) for name in names}
    given = SimpleNamespace(attn_metadata=dict.fromkeys(names, about), slot_mapping=slots)
    mla.get_forward_context = lambda: given
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.kv_cache = torch.empty(1, count, attention.head_size)
        attention.impl.forward_mqa = attending(cache, causal)
    model.model.embed_tokens = nn.Embedding.from_pretrained(table)
    model.logits_processor = nn.Module()  # the head, and that of the Markov head, are whole here
    model.logits_processor.forward = lambda head, x: x @ head.weight.T
    model.lm_head = SimpleNamespace(weight=table)
    model.process_weights_after_loading()
    context = model.combine_hidden_states(features(3 * table.shape[1]))
    at = torch.arange(CONTEXT)
    model.precompute_and_store_context_kv(context, at, at)
    ids = torch.tensor([TOKENS[0], *[model.config.mask_token_id] * (count - 1)])
    hidden = model(ids, torch.arange(CONTEXT, CONTEXT + count))
    before = torch.tensor(TOKENS[:-1])
    return model.compute_draft_logits(hidden) + model.markov_bias(model.markov_embed(before))


def attending(cache: Latents, causal: bool) -> Any:
    """Softmax over the context's and the block's latents, of queries [S, H, D] in that space."""

    def forward_mqa(q: Tensor, own: Tensor, _about: object, layer: Any) -> tuple[Tensor, None]:
        rows = torch.cat((cache[layer.layer_name], own[0]))
        scores = torch.einsum("shd,td->sht", q, rows) * layer.impl.scale
        seen = torch.ones(len(q), len(rows), dtype=torch.bool)
        seen = seen.tril(len(rows) - len(q)) if causal else seen
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return torch.einsum("sht,tr->shr", weights, rows[:, : layer.kv_lora_rank]), None

    return forward_mqa


def query_and_cache(
    plain: Tensor, q: Tensor, latent: Tensor, k: Tensor, cache: Tensor, _slots: Tensor,
    *, positions: Tensor, cos_sin_cache: Tensor,
) -> Tensor:  # fmt: skip
    """The whole query of each head; the block's own latents are cached."""
    cache[0] = torch.cat((latent, turned(k, positions, cos_sin_cache).flatten(1)), dim=-1)
    return torch.cat((plain, turned(q, positions, cos_sin_cache)), dim=-1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, at: Tensor, angles: Tensor) -> Tensor:
    """Neighbouring pairs of [N, H, D] turned by the rows `at` of [P, D], cosines before sines."""
    cos, sin = angles[at][:, None].chunk(2, dim=-1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


if __name__ == "__main__":
    main()
