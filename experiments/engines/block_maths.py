"""What vLLM 0.33's and SGLang 0.5.23's own classes compute of blocks: `block_maths.json`.

Classes, configs, loaders, projections, norms, rotation and heads are the engines', in float32 on a
CPU, and so is what they tell their attention: window, causality, sinks. Its kernels are not there:
a softmax in plain torch, with the sink of a head as one more score, stands in for them.
Usage: `experiments/run block_maths`.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import asking  # noqa: E402
import torch  # noqa: E402
from k3_draft import CONTEXT, TOKENS, features  # noqa: E402
from sink_drafts import CASES, write_draft  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Cache = dict[int, tuple[Tensor, Tensor]]
COUNT = len(TOKENS)
AT = torch.arange(CONTEXT)
SLOTS = torch.arange(CONTEXT, CONTEXT + COUNT)


def answers(engine: str) -> dict[str, list[list[float]]]:
    """[K, 24 tokens] logits of every case."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asking.write_target(folder / "target")
        for case in CASES:
            draft = write_draft(folder / case, case)
            found[case] = OF[engine](draft, folder / "target")[:, :24].tolist()
    return found


def of_vllm(draft: Path, target: Path) -> Tensor:
    """By the class that vLLM builds for the draft."""
    import vllm.model_executor.models.qwen3_dflash as dflash
    import vllm_loader
    import vllm_platform

    vllm_platform.stand_on_cpu()
    dflash.ops = SimpleNamespace(
        rms_norm=lambda out, x, weight, eps: out.copy_(_norm(x, _by_layer(weight, x), eps)),
        rotary_embedding=lambda at, k, _q, size, angles, _neox: _turn(k, at, size, angles),
    )
    subject = vllm_loader.subject(draft, target)
    with subject.context, torch.no_grad():
        model, table = _loaded(subject)
        cache: Cache = {}
        for number, (layer, causal) in enumerate(
            zip(model.model.layers, model.get_draft_attn_causal(), strict=True)
        ):
            own = layer.self_attn
            window = None if own.sliding_window is None else own.sliding_window - 1
            own.attn.forward = _attending(own, cache, number, window, causal=causal)
            own.attn.kv_cache = None
            turns = own.rotary_emb  # whose table was rounded to BF16
            turns.cos_sin_cache = turns._compute_cos_sin_cache()
            own.attn.impl.do_kv_cache_update = _caching(cache, number)
        model.model._build_fused_kv_buffers()
        context = model.combine_hidden_states(features(3 * table.shape[1]))
        model.precompute_and_store_context_kv(context, AT, AT)
        ids = torch.tensor([TOKENS[0], *[model.model.mask_token_id] * (COUNT - 1)])
        hidden = model.model.forward(ids, SLOTS, torch.nn.functional.embedding(ids, table))[1:]
        logits: Tensor = hidden @ table.T
        if hasattr(model, "markov_embed"):
            before = model.markov_embed(torch.tensor(TOKENS[:-1]))
            logits = logits + before @ model.model.markov_head.markov_w2.weight.T
        return logits


def of_sglang(draft: Path, target: Path) -> Tensor:
    """By the class that SGLang builds for the draft."""
    import sglang.srt.models.dflash as dflash
    import sglang_loader

    dflash.apply_qk_norm = lambda q, k, by_q, by_k, size, **_: (
        _norm_heads(q, by_q, size), _norm_heads(k, by_k, size)
    )  # fmt: skip
    subject = sglang_loader.loaded(draft, target, 1, 0).subject
    with subject.context, torch.no_grad():
        model, table = _loaded(subject)
        for module in model.modules():
            if hasattr(module, "forward_native"):
                module.forward = module.forward_native
        cache: Cache = {}
        context = model.project_target_hidden(features(3 * table.shape[1]))
        for number, layer in enumerate(model.layers):
            own = layer.self_attn
            window = None if own.sliding_window_size == -1 else own.sliding_window_size
            causal = own.attn_type == dflash.AttentionType.DECODER
            own.attn.forward = _attending(own, cache, number, window, causal=causal)
            k, v = own.kv_proj_only(context)
            k = own.apply_k_rope(AT, own.apply_k_norm(k))
            cache[number] = _heads(k, own.head_dim), _heads(v, own.head_dim)
        ids = torch.tensor([TOKENS[0], *[model.draft_config.mask_token_id] * (COUNT - 1)])
        given = torch.nn.functional.embedding(ids, table)
        hidden = model(ids, SLOTS, None, input_embeds=given).hidden_states[1:]
        logits: Tensor = hidden @ table.T
        if hasattr(model, "markov_head"):
            before = torch.tensor(TOKENS[:-1])
            logits = logits + model.markov_head.step_bias(before, hidden_states=None, state=None)[0]
        return logits


OF = {"vllm": of_vllm, "sglang": of_sglang}


def _loaded(subject: Any) -> tuple[Any, Tensor]:
    """The model in float32 with its weights, and the embedding, which is the head as well."""
    model = subject.build()
    subject.load_folder(model)
    for step in subject.last_steps(model).values():
        step()
    return model.float(), subject.tensors["embed_tokens.weight"].float()


def _attending(own: Any, cache: Cache, number: int, window: int | None, *, causal: bool) -> Any:
    """The attention of a layer: [S, H * D] of queries, keys and values of the block.

    `window`: how far behind itself a slot sees.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **_given: Any) -> Tensor:
        before_k, before_v = cache[number]
        keys = torch.cat((before_k, _heads(k, own.head_dim)))
        values = torch.cat((before_v, _heads(v, own.head_dim)))
        share = own.num_heads // own.num_kv_heads
        keys, values = (x.repeat_interleave(share, dim=1) for x in (keys, values))
        scores = torch.einsum("shd,thd->hst", _heads(q, own.head_dim), keys) * own.scaling
        behind = SLOTS[:, None] - torch.cat((AT, SLOTS))
        seen = behind >= 0 if causal else torch.ones_like(behind).bool()
        seen = seen if window is None else seen & (behind.abs() <= window)
        scores = scores.masked_fill(~seen, float("-inf"))
        sinks = own.attention_sink_bias
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, COUNT, 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(behind[0])]
        return torch.einsum("hst,thd->shd", weights, values).flatten(1)

    return forward


def _caching(cache: Cache, number: int) -> Any:
    def update(_attn: Any, k: Tensor, v: Tensor, *_: Any) -> None:
        cache[number] = k.clone(), v.clone()

    return update


def _heads(flat: Tensor, size: int) -> Tensor:
    return flat.view(len(flat), -1, size)


def _norm_heads(x: Tensor, norm: nn.Module, size: int) -> Tensor:
    by: Any = norm
    return _norm(_heads(x, size), by.weight, by.variance_epsilon).flatten(1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _by_layer(weight: Tensor, x: Tensor) -> Tensor:
    """One weight for all, or one for each layer of [L, T, KV, D]."""
    return weight if weight.ndim == 1 else weight.view(len(weight), *[1] * (x.ndim - 2), -1)


def _turn(keys: Tensor, at: Tensor, size: int, angles: Tensor) -> None:
    """Halves of heads of [N, KV * D] turned in place by rows `at`, cosines before sines."""
    cos, sin = angles[at][:, None].chunk(2, dim=-1)
    a, b = keys.view(len(keys), -1, size).chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    keys.copy_(turned.flatten(1))


if __name__ == "__main__":
    found = asking.of_both(__file__, answers)
    if found is not None:
        rows = {f"{e} {case}": rows for e, cases in found.items() for case, rows in cases.items()}
        asking.write_table(HERE / "block_maths.json", rows)
