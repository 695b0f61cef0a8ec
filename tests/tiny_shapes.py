"""Names and shapes of the tensors of drafts, by the keys of their config.json.

Of tiny drafts and of published ones. Where the order matters, it is that of tiny.py's random draws.
"""

from collections.abc import Collection, Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]


def named(prefix: str, shapes: Shapes) -> Shapes:
    """The tensors of modules."""
    ends = {name: "" if name.endswith("bias") else ".weight" for name in shapes}
    return {f"{prefix}{name}{ends[name]}": shape for name, shape in shapes.items()}


def tables(c: Config, has: Collection[str], outer: str = "") -> Shapes:
    """Embedding, head and maps of a pruned vocabulary."""
    vocab, hidden = c["vocab_size"], c["hidden_size"]
    own = c.get("draft_vocab_size") or vocab
    every: Shapes = {"embed_tokens": (vocab, hidden), "lm_head": (own, hidden)}
    every |= {"d2t": (own,), "t2d": (vocab,)}
    names = {"embed_tokens": f"{outer}embed_tokens.weight", "lm_head": "lm_head.weight"}
    return {names.get(name, name): shape for name, shape in every.items() if name in has}


def attention(
    c: Config, width: int, *, biased: bool = False, normed: bool = False, gates: int = 1
) -> Shapes:
    """Of grouped queries, whose projection has `gates` times their rows."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head = c.get("head_dim") or hidden // heads
    rows = {"q": gates * heads * head, "k": c.get("num_key_value_heads", heads) * head}
    rows["v"] = rows["k"]
    found: Shapes = {f"self_attn.{x}_proj": (count, width) for x, count in rows.items()}
    found["self_attn.o_proj"] = (hidden, heads * head)
    if biased:
        found |= {f"self_attn.{x}_proj.bias": (count,) for x, count in rows.items()}
    return found | ({f"self_attn.{x}_norm": (head,) for x in "qk"} if normed else {})


def latent_attention(c: Config, width: int) -> Shapes:
    """DeepSeek's."""
    heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    return {
        "self_attn.q_a_proj": (c["q_lora_rank"], width),
        "self_attn.q_a_layernorm": (c["q_lora_rank"],),
        "self_attn.q_b_proj": (heads * (nope + rope), c["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa": (c["kv_lora_rank"] + rope, width),
        "self_attn.kv_a_layernorm": (c["kv_lora_rank"],),
        "self_attn.kv_b_proj": (heads * (nope + c["v_head_dim"]), c["kv_lora_rank"]),
        "self_attn.o_proj": (c["hidden_size"], heads * c["v_head_dim"]),
    }


def indexer(c: Config, width: int) -> Shapes:
    """Of DeepSeek's sparse attention."""
    heads, head = c["index_n_heads"], c["index_head_dim"]
    rows = {"wq_b": (heads * head, c["q_lora_rank"]), "wk": (head, width)}
    rows |= {"weights_proj": (heads, width), "k_norm": (head,), "k_norm.bias": (head,)}
    return {f"self_attn.indexer.{name}": shape for name, shape in rows.items()}


def gated(block: str, hidden: int, inner: int) -> Shapes:
    """One MLP."""
    return {f"{block}.{x}_proj": (inner, hidden) for x in ("gate", "up")} | {
        f"{block}.down_proj": (hidden, inner)
    }


def mlp(c: Config) -> Shapes:
    """The MLP of a layer, and the norms around it."""
    norms = ("input_layernorm", "post_attention_layernorm")
    own = gated("mlp", c["hidden_size"], c["intermediate_size"])
    return own | {norm: (c["hidden_size"],) for norm in norms}


def eagle3(
    c: Config,
    has: Collection[str],
    first: str = "midlayer.",
    *,
    latent: bool = False,
    features: int | None = None,
    layers: int | None = None,
) -> Shapes:
    """EAGLE-3.

    Args:
        has: optional tensors.
        first: prefix of layer 0; with a "model." prefix, fc, norm and embed_tokens have it too.
        features: width of what the target gives.
        layers: where it is not the config's.
    """
    hidden = c["hidden_size"]
    outer, width = "model." if first.startswith("model.") else "", features or 3 * hidden
    found: Shapes = {f"{outer}fc.weight": (hidden, width), f"{outer}norm.weight": (hidden,)}
    if "fc_norm" in has:
        found |= {f"{outer}fc_norm.{i}.weight": (width // 3,) for i in range(3)}
    if "input_norm" in has:
        found[f"{outer}input_norm.weight"] = (width,)
    found |= tables(c, has, outer) | (
        {"mask_hidden": (1, 1, width)} if "mask_hidden" in has else {}
    )
    for i in range(layers or c["num_hidden_layers"]):
        wide = hidden if i else 2 * hidden
        own = latent_attention(c, wide) if latent else attention(c, wide, normed="qk_norm" in has)
        own |= mlp(c) | ({} if i else {"hidden_norm": (hidden,)})
        found |= named(f"{outer}layers.{i}." if i else first, own)
    return found


def dflash(c: Config, has: Collection[str], *, features: int, own: Config | None = None) -> Shapes:
    """DFlash; `own` keys of DFlash-2 add its convolutions and its selector."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    found: Shapes = {"fc.weight": (hidden, features)}
    found |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)} | tables(c, has)
    for i in range(c["num_hidden_layers"]):
        found |= named(f"layers.{i}.", attention(c, hidden, normed=True) | mlp(c))
        if c.get("attention_sink_bias"):
            found[f"layers.{i}.self_attn.attention_sink_bias"] = (heads,)
        if not own:
            continue
        for conv in ("attention_conv", "mlp_conv"):
            taps, name = own["conv_kernel_size"], f"layers.{i}.{conv}"
            added = 2 * taps * hidden // own["conv_group_size"]
            found[f"{name}.base_kernel"] = (2, taps, hidden)
            found[f"{name}.kernel_projection.weight"] = (added, hidden)
    if own:
        rank, selector = own["selector_rank"], "candidate_selector."
        for side in ("predecessor", "successor"):
            found[f"{selector}{side}_codebook"] = (c["vocab_size"], rank)
        found[f"{selector}hidden_projection.weight"] = (rank, hidden)
    return found


def laguna(c: Config, has: Collection[str], *, layers: int) -> Shapes:
    """Laguna's DFlash over some layers of its target."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    gates = {True: 1, "per-head": 1, "per-element": c["head_dim"]}.get(c["gating"])
    found = dflash(c, has, features=layers * hidden)
    for i in range(c["num_hidden_layers"]):
        at = f"layers.{i}.self_attn."
        rows = sum(found.pop(f"{at}{x}_proj.weight")[0] for x in "qkv")
        found[f"{at}qkv_proj.weight"] = (rows, hidden)
        found |= {f"{at}g_proj.weight": (heads * gates, hidden)} if gates else {}
    return found | {f"aux_hidden_norms.{i}.weight": (hidden,) for i in range(layers)}


def dspark(c: Config, rank: int) -> Shapes:
    """What DSpark adds to DFlash."""
    vocab = c["vocab_size"]
    return {
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (c.get("draft_vocab_size") or vocab, rank),
        "confidence_head.proj.weight": (1, c["hidden_size"] + rank),
    }


def mixture(c: Config, experts: int, inner: int, shared: tuple[str, int]) -> Shapes:
    """Experts, and the one that all tokens go through: its name and width."""
    hidden = c["hidden_size"]
    found: Shapes = {}
    for i in range(experts):
        found |= gated(f"mlp.experts.{i}", hidden, inner)
    return found | gated(f"mlp.{shared[0]}", hidden, shared[1])


def nextn(c: Config, attention: Shapes, experts: int = 0) -> Shapes:
    """A layer of DeepSeek's or GLM's MTP, beside its attention."""
    hidden = c["hidden_size"]
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    found = attention | {norm: (hidden,) for norm in norms} | {"eh_proj": (hidden, 2 * hidden)}
    if not experts:
        return found | gated("mlp", hidden, c["intermediate_size"])
    inner = c["moe_intermediate_size"]
    found |= {"mlp.gate": (experts, hidden), "mlp.gate.e_score_correction_bias": (experts,)}
    return found | mixture(c, experts, inner, ("shared_experts", inner))


def qwen3_next_mtp(c: Config, experts: int) -> Shapes:
    """The MTP layer of Qwen3-Next, or of Qwen3.5 without experts."""
    hidden = c["hidden_size"]
    around = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    norms = ("input_layernorm", "post_attention_layernorm")
    own = attention(c, hidden, normed=True, gates=2)
    if experts:
        own |= {"mlp.gate": (experts, hidden), "mlp.shared_expert_gate": (1, hidden)}
        shared = ("shared_expert", c["shared_expert_intermediate_size"])
        own |= mixture(c, experts, c["moe_intermediate_size"], shared)
    else:
        own |= gated("mlp", hidden, c["intermediate_size"])
    found: Shapes = {f"mtp.{name}.weight": (hidden,) for name in around}
    found |= named("mtp.layers.0.", {norm: (hidden,) for norm in norms})
    return found | {"mtp.fc.weight": (hidden, 2 * hidden)} | named("mtp.layers.0.", own)


def step3p5_mtp(c: Config, first: int, modules: int) -> Shapes:
    """The MTP modules of Step-3.5, behind the target's layers."""
    hidden, heads = c["hidden_size"], c["attention_other_setting"]["num_attention_heads"]
    counts = {"num_attention_heads": heads, "num_key_value_heads": c["num_attention_groups"]}
    norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm")
    own = attention({**c, **counts}, hidden)
    own |= {"self_attn.g_proj": (heads, hidden)} | attention({**c, **counts}, hidden, normed=True)
    layer: Shapes = {norm: (hidden,) for norm in norms} | {"eh_proj": (hidden, 2 * hidden)}
    layer |= own | gated("mlp", hidden, c["intermediate_size"])
    layer["transformer.shared_head.norm"] = (hidden,)
    layer["transformer.shared_head.output"] = (c["vocab_size"], hidden)
    found: Shapes = {}
    for i in range(modules):
        found |= named(f"model.layers.{first + i}.", layer)
    return found


def causal_lm(c: Config, has: Collection[str], **attends: bool) -> Shapes:
    """A language model."""
    head = {"lm_head"}
    found = tables(c, set(has) - head, "model.") | {"model.norm.weight": (c["hidden_size"],)}
    found |= tables(c, head & set(has))
    own = attention(c, c["hidden_size"], **attends) | mlp(c)
    for i in range(c["num_hidden_layers"]):
        found |= named(f"model.layers.{i}.", own)
    return found
