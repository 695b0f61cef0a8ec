"""The target's forward pass for much text on few cores: keys and values in place.

Products are in BF16 where the CPU has instructions for them, else in float32; all between them is
float32.

The classes of transformers copy a cache at every step and repeat keys for each query head, which
takes more time on a CPU than the products. `python target.py TARGET` compares both.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch program uses
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

_CPU = torch.cpu.get_capabilities()
_FAST = _CPU.get("amx_bf16") or _CPU.get("avx512_bf16")
PRODUCTS = torch.bfloat16 if _FAST else torch.float32


class Llama:
    """A Llama without biases whose head is its embedding."""

    def __init__(self, folder: Path, dtype: torch.dtype = PRODUCTS) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.dtype = dtype
        self.config = AutoConfig.from_pretrained(folder)
        self.embedding = model.model.embed_tokens.weight.detach()
        self.head = self.embedding.to(dtype)
        self.norm = model.model.norm.weight.detach()
        self.layers = [
            {
                "in": layer.input_layernorm.weight.detach(),
                "post": layer.post_attention_layernorm.weight.detach(),
                "qkv": _stacked(layer.self_attn, "q_proj", "k_proj", "v_proj").to(dtype),
                "o": _stacked(layer.self_attn, "o_proj").to(dtype),
                "gate_up": _stacked(layer.mlp, "gate_proj", "up_proj").to(dtype),
                "down": _stacked(layer.mlp, "down_proj").to(dtype),
            }
            for layer in model.model.layers
        ]

    def empty_cache(self, batch: int, length: int) -> Tensor:
        """[layers, 2, B, KV heads, length, head width]."""
        config = self.config
        shape = len(self.layers), 2, batch, config.num_key_value_heads, length, config.head_dim
        return torch.zeros(shape, dtype=self.dtype)

    def run(
        self, ids: Tensor, pads: Tensor, start: int, cache: Tensor, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Read tokens [B, n] of columns start .. start + n - 1, and write their keys and values.

        Args:
            pads: [B] int64, columns before a text begins.
            taps: layers whose outputs are returned.

        Returns:
            [B, n, taps * width], and what the head reads, [B, n, width].
        """
        config = self.config
        batch, n = ids.shape
        end, width = start + n, config.head_dim
        heads, groups = config.num_key_value_heads, config.num_attention_heads
        columns = torch.arange(start, end)
        positions = (columns - pads[:, None]).clamp(min=0)
        half = width // 2
        theta = config.rope_parameters["rope_theta"]
        angles = (positions[..., None] * theta ** (-torch.arange(half) / half))[:, :, None]
        cos, sin = angles.cos(), angles.sin()
        # A column sees itself, and the earlier ones of its text.
        seen = torch.arange(end)[None, None] <= columns[None, :, None]
        seen = seen & (torch.arange(end)[None, None] >= pads[:, None, None])
        seen |= torch.arange(end)[None, None] == columns[None, :, None]
        mask = torch.zeros(batch, 1, n, end, dtype=self.dtype)
        mask = mask.masked_fill_(~seen[:, None], -torch.inf).repeat(1, 1, groups // heads, 1)
        x, tapped = self.embedding[ids], []
        for i, layer in enumerate(self.layers):
            y = _product(self._normed(x, layer["in"]), layer["qkv"])
            y = y.view(batch, n, groups + 2 * heads, width)
            turned = _rotated(y[:, :, : groups + heads], cos, sin)
            q, k = turned[:, :, :groups], turned[:, :, groups:]
            keys, values = cache[i, 0, :, :, :end], cache[i, 1, :, :, :end]
            keys[:, :, start : start + n] = k.transpose(1, 2)
            values[:, :, start : start + n] = y[:, :, groups + heads :].transpose(1, 2)
            # The query heads of a KV head are rows of one product: four times as fast for n = 1.
            rows = q.transpose(1, 2).reshape(batch, heads, -1, width).to(self.dtype)
            mixed = F.scaled_dot_product_attention(rows, keys, values, mask)
            mixed = mixed.reshape(batch, groups, n, width).transpose(1, 2)
            x = x + _product(mixed.reshape(batch, n, -1), layer["o"])
            gate, up = _product(self._normed(x, layer["post"]), layer["gate_up"]).chunk(2, -1)
            x = x + _product(F.silu(gate) * up, layer["down"])
            if i in taps:
                tapped.append(x)
        return torch.cat(tapped, dim=-1), self._normed(x, self.norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)


def _stacked(module: torch.nn.Module, *names: str) -> Tensor:
    return torch.cat([getattr(module, name).weight.detach() for name in names])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight).float()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


if __name__ == "__main__":
    own, ids = Llama(Path(sys.argv[1]), torch.float32), torch.randint(1000, 40_000, (3, 24))
    reference = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    with torch.inference_mode():
        out = reference.model(ids, output_hidden_states=True)
        pads, cache = torch.tensor([0, 3, 7]), own.empty_cache(3, 31)
        padded = torch.zeros(3, 31, dtype=torch.int64)
        for i, pad in enumerate(pads.tolist()):
            padded[i, pad : pad + 24] = ids[i]
        spans = ((0, 20), (20, 21), (21, 31))
        parts = [own.run(padded[:, a:b], pads, a, cache, (2, 15, 27)) for a, b in spans]
        taps, final = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        wanted = torch.cat([out.hidden_states[j + 1] for j in (2, 15, 27)], dim=-1)
        for i, pad in enumerate(pads.tolist()):
            for got, want in ((taps, wanted), (final, out.last_hidden_state)):
                difference = (got[i, pad : pad + 24] - want[i]).abs().max() / want[i].abs().max()
                print(f"text {i}: {difference:.1e} of the largest value")
