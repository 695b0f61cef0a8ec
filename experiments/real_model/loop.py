"""The plain greedy loop: target and draft step by step, with nothing of draftquant's maths.

The target verifies with its own KV cache, cut back after each step; the draft keeps no cache and
reads all rows again. Steps and text are held against replay along recorded traces.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch program uses
from draftquant import api as dq
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


class PlainEagle3:
    """EAGLE-3 with one Llama layer, as SpecForge writes it: every row read again at each step."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        loaded = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix("midlayer."): w for name, w in loaded.items()}
        self.weights = {
            name: w.float() if w.is_floating_point() else w for name, w in self.weights.items()
        }
        self.embedding = embedding

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root mean square norm."""
        eps = self.config["rms_norm_eps"]
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """[n, in] -> [n, out]."""
        return F.linear(x, self.weights[f"{name}.weight"])

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of [n, heads, width]."""
        half = x.shape[-1] // 2
        speeds = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = (positions[:, None] * speeds)[:, None]
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def layer(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of n rows, the last of which may be a chain's."""
        embedded = self.norm(self.embedding[tokens], "input_layernorm")
        x = torch.cat((embedded, self.norm(hidden, "hidden_norm")), dim=-1)
        n, width, heads = len(tokens), self.config["head_dim"], self.config["num_attention_heads"]
        q, k, v = (
            self.linear(x, f"self_attn.{name}_proj").view(n, -1, width) for name in ("q", "k", "v")
        )
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        k, v = (y.repeat_interleave(heads // y.shape[1], dim=1) for y in (k, v))
        q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
        hidden = hidden + self.linear(mixed.reshape(n, -1), "self_attn.o_proj")
        y = self.norm(hidden, "post_attention_layernorm")
        gated = F.silu(self.linear(y, "mlp.gate_proj")) * self.linear(y, "mlp.up_proj")
        return hidden + self.linear(gated, "mlp.down_proj")

    def proposed(self, tokens: Sequence[int], features: Tensor, count: int) -> list[int]:
        """Tokens after `tokens`, of which all but the last have features [n - 1, width]."""
        hidden, drafted = self.linear(features, "fc"), []
        ids, places = torch.tensor(tokens[1:]), torch.arange(len(tokens) - 1)
        for _ in range(count):
            out = self.layer(ids, hidden, places)[-1:]
            best = int(self.linear(self.norm(out, "norm"), "lm_head").argmax())
            drafted.append(best + int(self.weights["d2t"][best]))
            # The next row reads the drafted token beside what this row gave.
            ids, hidden = torch.cat((ids, ids.new_tensor(drafted[-1:]))), torch.cat((hidden, out))
            places = torch.arange(len(ids))
        return drafted


@torch.inference_mode()
def decode(
    model: Any, draft: PlainEagle3, prompt: Sequence[int], length: int, k: int
) -> tuple[list[int], list[int], list[float]]:
    """Decode greedily with a draft, up to `length` tokens in all.

    Returns:
        The text, the tokens that each step accepted, and by how much each new token's logit leads.
    """
    layers = [layer - 1 for layer in draft.config["eagle_aux_hidden_state_layer_ids"]]
    cache = DynamicCache()  # plain: a window's own could not be cut back
    features: list[Tensor] = []

    def run(ids: Sequence[int]) -> Tensor:
        out = model(torch.tensor([ids]), past_key_values=cache, output_hidden_states=True)
        features.append(torch.cat([out.hidden_states[i + 1][0] for i in layers], dim=-1))
        logits: Tensor = out.logits[0]
        return logits

    tokens, accepted = list(prompt), []
    top = run(tokens)[-1:].topk(2)
    leads = [float(top.values[0, 0] - top.values[0, 1])]
    tokens.append(int(top.indices[0, 0]))
    while len(tokens) + k <= length:
        drafted = draft.proposed(tokens, torch.cat(features), k)
        top = run([tokens[-1], *drafted]).topk(2)
        best = top.indices[:, 0].tolist()
        right = next((i for i in range(k) if drafted[i] != best[i]), k)
        kept = right + 1
        leads += (top.values[:kept, 0] - top.values[:kept, 1]).tolist()
        tokens += best[:kept]
        accepted.append(right)
        features[-1] = features[-1][:kept]
        if right < k:
            cache.crop(right - k)  # so many at the end leave
    return tokens, accepted, leads


def compare(target: Path, draft: Path, traces: Path, k: int, count: int) -> list[dict[str, Any]]:
    """Decode the prompts of `count` traces, and hold text and steps against what was recorded."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    plain = PlainEagle3(draft, model.get_input_embeddings().weight.detach())
    (found,) = dq.replay(draft, traces, num_draft_tokens=k, target=target, dtype="float32")
    counts = {prompt.id: prompt.counts.histogram for prompt in found.prompts}
    rows = []
    for trace, _ in zip(dq.TraceFolder.open(traces), range(count), strict=False):
        recorded = trace.token_ids.tolist()
        start = trace.prompt_length
        tokens, accepted, leads = decode(model, plain, recorded[:start], len(recorded), k)
        both = enumerate(zip(tokens, recorded, strict=False))
        differs = next((i for i, (own, one) in both if own != one), None)
        rows.append({
            "id": trace.id,
            "lead_where_texts_differ": differs and leads[differs - start],
            "accepted": [accepted.count(j) for j in range(k + 1)],
            "replayed": list(counts[trace.id]),
        })  # fmt: skip
    return rows
