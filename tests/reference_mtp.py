"""MTP layers assembled from transformers' own decoder layers: the oracle of our forward maths.

Attention, MLP, mixture and rope are transformers'. What is added is written from the model classes
of vLLM 0.33 (`mimo_mtp.py`, `deepseek_mtp.py`, `glm4_moe_mtp.py`, `qwen3_5_mtp.py`): the masked
first embedding, both norms, the order of the concat, the last norm, and what the next step reads.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm_dsa
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.step3p7 import modeling_step3p7 as step
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig


def _kind(module: Any, layer: str, around: str | None = None) -> tuple[Any, Any, Any]:
    around = around or layer
    names = (f"{around}Config", f"{layer}DecoderLayer", f"{around}RotaryEmbedding")
    config, decoder, rotary = (getattr(module, name) for name in names)
    return config, decoder, rotary


KINDS = {
    "mimo-mtp": _kind(qwen2, "Qwen2"),
    "deepseek-mtp": _kind(deepseek, "DeepseekV3"),
    "glm4-moe-mtp": _kind(glm, "Glm4Moe"),
    "qwen3-next-mtp": _kind(qwen3_next, "Qwen3Next"),
    "deepseek_v32": _kind(deepseek_v32, "DeepseekV32"),
    "glm_moe_dsa": _kind(glm_dsa, "GlmMoeDsa"),
    "qwen3_5_text": _kind(qwen3_5, "Qwen3_5", "Qwen3_5Text"),
}
"""By family, or by model_type where one family has layers of two classes."""
ZERO_CENTRED = "qwen3-next-mtp"
STEP = "step3p5-mtp"
UNMASKED = (ZERO_CENTRED, STEP)
"""Their norms multiply by 1 + weight, and they mask no embedding: `qwen3_5_mtp.py`."""
FEEDS_BACK_ITS_STREAM = ("glm4-moe-mtp", STEP)
"""What the next step reads is not normed before: `glm4_moe_mtp.py:125`, `step3p5_mtp.py`."""


class ReferenceMtp:
    """One MTP layer that recomputes a whole chain for every token: no cache, no blocks of rows.

    Args:
        family: name of the draft's family.
        config: its config.json.
        weights: by canonical name, float64.
    """

    def __init__(
        self, family: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> None:
        config = config.get("text_config", config)
        self.window = config["sliding_window"] if family == STEP else None
        self.once = False  # later steps read what the first one's indexer chose
        if family == STEP:
            self.family, self.weights, self.eps = family, weights, config["rms_norm_eps"]
            self.layer, self.rotary = _of_step(config, weights)
            return
        kind = config["model_type"] if config["model_type"] in KINDS else family
        config_class, layer_class, rotary_class = KINDS[kind]
        keys = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
        if "rope_parameters" not in keys:
            rope = {"rope_type": "default", "rope_theta": keys.pop("rope_theta")}
            if "partial_rotary_factor" in keys:
                rope["partial_rotary_factor"] = keys.pop("partial_rotary_factor")
            keys["rope_parameters"] = rope
        number, self.once = _number(family, config), "index_share_for_mtp_iteration" in keys
        if "index_topk" in keys:
            keys |= {"num_hidden_layers": number + 1, "head_dim": keys["qk_rope_head_dim"]}
        made = config_class(**keys, attn_implementation="eager")
        self.family, self.weights, self.eps = family, weights, config["rms_norm_eps"]
        self.layer: nn.Module = layer_class(made, number).double()
        if family == "deepseek-mtp":  # engines hand the draft's epsilon to the norms of latents
            attention: Any = self.layer.self_attn
            for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
                norm.variance_epsilon = self.eps
        self.layer.load_state_dict(_as_transformers(weights))
        self.layer.train(mode=False)
        self.rotary = rotary_class(made)

    @torch.no_grad()
    def logits(self, states: Tensor, token_ids: Tensor, row: int, depth: int) -> Tensor:
        """Logits of the draft token at a depth of the chain that starts at a row.

        Args:
            states: [N - 1, W], the target's last hidden states.
            token_ids: [N], the recorded tokens, which the chain is fed.
            row: the last position whose state is the target's own.
            depth: 0 is the first draft token.

        Returns:
            [V].
        """
        hidden, seen = states[: row + 1], row + 1 if self.once else None
        for _ in range(depth):  # a chain grows by one row each time, all of it computed again
            hidden = torch.cat((states[: row + 1], self.fed_back(hidden, token_ids, seen)[row:]))
        out = self._outputs(hidden, token_ids, seen)[-1]
        return self._norm("norm", out) @ self.weights["lm_head.weight"].T

    def fed_back(self, hidden: Tensor, token_ids: Tensor, seen: int | None = None) -> Tensor:
        """What the next step, or the next module, reads of these rows."""
        out = self._outputs(hidden, token_ids, seen)
        return out if self.family in FEEDS_BACK_ITS_STREAM else self._norm("norm", out)

    def _outputs(self, hidden: Tensor, token_ids: Tensor, seen: int | None = None) -> Tensor:
        """The layer over rows 0, 1, ... that see what stands before them, before the last norm.

        `seen`: they see no later rows than so many first ones, None = their own and all before.
        """
        rows = len(hidden)
        embedded = self.weights["embed_tokens.weight"][token_ids[1 : rows + 1]].clone()
        if self.family not in UNMASKED:
            embedded[0] = 0
        parts = (self._norm("embedding_norm", embedded), self._norm("state_norm", hidden))
        both = torch.cat(parts[::-1] if self.family == "mimo-mtp" else parts, dim=-1)
        x = (both @ self.weights["fc.weight"].T)[None]
        positions = torch.arange(rows)[None]
        hidden_ones = torch.ones(rows, rows).triu(1)
        if self.window is not None:
            hidden_ones += torch.ones(rows, rows).tril(-self.window)
        hidden_ones[:, seen or rows :] = 1
        mask = torch.zeros(rows, rows, dtype=x.dtype)
        mask = mask.masked_fill(hidden_ones > 0, float("-inf"))[None, None]
        turned = self.rotary(x, positions)
        given = {"attention_mask": mask, "position_ids": positions, "position_embeddings": turned}
        out: Any = self.layer(x, **given)
        return (out[0] if isinstance(out, tuple) else out)[0]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        weight = self.weights[f"{name}.weight"]
        return (1 + weight if self.family in UNMASKED else weight) * x * scale


class ReferenceModules:
    """Several modules, each a `ReferenceMtp` that all rows go through in their turn.

    Args: see `ReferenceMtp`; weights of all modules.
    """

    def __init__(
        self, family: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> None:
        if family != STEP:
            config = config | {"num_nextn_predict_layers": 1}
        count = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
        self.modules = [ReferenceMtp(family, config, _of_module(weights, i)) for i in range(count)]

    @torch.no_grad()
    def logits(self, states: Tensor, token_ids: Tensor, row: int, depth: int) -> Tensor:
        """Logits of draft token `depth` from a row, all rows up to it computed anew.

        Args: see `ReferenceMtp.logits`.
        """
        hidden = states[: row + 1]
        for number, module in enumerate(self.modules[:depth]):
            hidden = module.fed_back(hidden, token_ids[number:])
        module = self.modules[depth]
        out = module._outputs(hidden, token_ids[depth:])
        return module._norm("norm", out)[-1] @ module.weights["lm_head.weight"].T


def _of_step(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> tuple[nn.Module, Any]:
    """One module's layer, as that of a target of which it is the only layer, and its rope."""
    keys = {"vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps"}
    made = Step3p7TextConfig(
        **{key: config[key] for key in keys},
        num_hidden_layers=1,
        num_attention_heads=config["attention_other_setting"]["num_attention_heads"],
        num_key_value_heads=config["num_attention_groups"],
        layer_types=["sliding_attention"],
        mlp_layer_types=["dense"],
        sliding_window=config["sliding_window"],
        rope_theta=config["rope_theta"][-1],
        attn_implementation="eager",
    )
    layer = step.Step3p7DecoderLayer(made, 0).double()
    layer.load_state_dict(_as_transformers(weights))
    layer.train(mode=False)
    rotary = step.Step3p7RotaryEmbedding(made)
    return layer, lambda x, positions: rotary(x, positions, "sliding_attention")


def _of_module(weights: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """The tensors of one module, named as if it were the only one."""
    layer, around = f"layers.{number}.", f"modules.{number}."
    own = {n: w for n, w in weights.items() if n.startswith((layer, around))}
    if number == 0:
        own |= {n: w for n, w in weights.items() if not n.startswith(("layers.", "modules."))}
    named = {n.replace(layer, "layers.0.").removeprefix(around): w for n, w in own.items()}
    return {"embed_tokens.weight": weights["embed_tokens.weight"], **named}


def _number(family: str, config: Mapping[str, Any]) -> int:
    """Of the layer among the target's, which says whether it has experts."""
    if family == ZERO_CENTRED:
        return 3  # the first of the target's layers with full attention
    return 0 if family == "mimo-mtp" else int(config["num_hidden_layers"])


def _as_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder layer's tensors, experts stacked as transformers 5 holds them."""
    own = {n.removeprefix("layers.0."): w for n, w in weights.items() if n.startswith("layers.0.")}
    single = {name: w for name, w in own.items() if ".experts." not in name}
    count = len({name.split(".")[2] for name in own if ".experts." in name})
    if count:

        def stacked(leaf: str) -> Tensor:
            return torch.stack([own[f"mlp.experts.{i}.{leaf}.weight"] for i in range(count)])

        wide = torch.cat((stacked("gate_proj"), stacked("up_proj")), dim=1)
        single |= {"mlp.experts.gate_up_proj": wide, "mlp.experts.down_proj": stacked("down_proj")}
    return single
