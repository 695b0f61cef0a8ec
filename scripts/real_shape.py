"""A draft of real size with random weights: the shape of Kimi-K2.5's EAGLE-3, 6.36 GB of BF16.

    python -m draftquant.scripts.real_shape OUT [--seed 0] [--scale 1.0] [--divide 8]

For measuring speed and memory, and for byte budgets. Its weights mean nothing: it predicts nothing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..quantize.layouts import StoredTensor
from ..quantize.staging import check_output, staged_output, write_text
from ..quantize.writer import SafetensorsFile
from ..recipes.errors import DraftQuantError

INITIALIZER_RANGE = 0.02
NORM_SPREAD = 0.05
PERIOD = 8_388_593  # prime: rows of any width start at different places of the tile
DIVISORS = (1, 2, 4, 8, 16, 32, 64)


def real_shape_config(divide: int = 1) -> dict[str, Any]:
    """config.json of lightseekorg/kimi-k2.5-eagle3, as TorchSpec exports it.

    Args:
        divide: one of `DIVISORS`; widths, heads and vocabulary become this many times smaller.
    """
    if divide not in DIVISORS:
        raise ValueError(f"divide: expected one of {DIVISORS}, got {divide}")
    heads, vocab = 64 // divide, 163840 // divide
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 7168 // divide,
        "intermediate_size": 12288 // divide,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": min(163584, vocab - 2),
        "eos_token_id": min(163585, vocab - 1),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "max_window_layers": 36,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
    }


def real_shape_tensors(config: dict[str, Any]) -> tuple[StoredTensor, ...]:
    """The 14 tensors of that draft, by the names that TorchSpec gives them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, vocab = config["num_attention_heads"] * config["head_dim"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (vocab, hidden),
        "fc": (hidden, 3 * hidden),
        "lm_head": (vocab, hidden),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.mlp.down_proj": (hidden, inner),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.post_attention_layernorm": (hidden,),
        "midlayer.self_attn.k_proj": (heads, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.v_proj": (heads, 2 * hidden),
        "norm": (hidden,),
    }
    return tuple(
        StoredTensor(name=f"{name}.weight", dtype="BF16", shape=shape)
        for name, shape in shapes.items()
    )


def write_real_shape_draft(
    folder: Path, *, seed: int = 0, scale: float = 1.0, divide: int = 1
) -> None:
    """Write the draft into a new folder: one tile of normals, read from another place per tensor.

    Drawing three billion normals takes minutes; repeating one tile is as fast as the disk and takes
    no memory beyond the tile. Equal arguments give equal bytes.

    Args:
        folder: to create.
        seed: of the tile.
        scale: multiplies the standard deviation of the linears, which is 0.02; norms stay near 1.
        divide: see `real_shape_config`.

    Raises:
        OutputError: the folder exists, or cannot be written.
    """
    config = real_shape_config(divide)
    tensors = real_shape_tensors(config)
    check_output(folder, needed_bytes=sum(tensor.nbytes for tensor in tensors))
    generator = torch.Generator().manual_seed(seed)
    tile = torch.randn(PERIOD, generator=generator).mul_(INITIALIZER_RANGE * scale).bfloat16()
    tile = torch.cat((tile, tile))  # so that one period is contiguous from every start
    with staged_output(folder) as staging:
        path = staging / "model.safetensors"
        with SafetensorsFile(path, tensors, {"format": "pt"}) as output:
            for tensor in tensors:
                if len(tensor.shape) == 1:
                    noise = torch.randn(tensor.shape, generator=generator)
                    output.write(tensor.name, noise.mul_(NORM_SPREAD).add_(1).bfloat16())
                else:
                    start = int(torch.randint(PERIOD, (), generator=generator))
                    _repeat(output, tensor, tile[start : start + PERIOD])
        write_text(staging / "config.json", json.dumps(config, indent=2) + "\n")


def _repeat(output: SafetensorsFile, tensor: StoredTensor, period: Tensor) -> None:
    """Fill a tensor with the same elements over and over."""
    written = 0
    while written < tensor.nbytes:
        rest = (tensor.nbytes - written) // period.element_size()
        written += output.write(tensor.name, period[:rest], offset=written)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when the draft was written, 2 when it was not.
    """
    parser = argparse.ArgumentParser(
        prog="real_shape", description="Write a draft of real size with random weights."
    )
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the linears' spread, 0.02")
    parser.add_argument("--divide", type=int, default=1, choices=DIVISORS, help="smaller widths")
    chosen = parser.parse_args(arguments)
    try:
        write_real_shape_draft(
            chosen.out, seed=chosen.seed, scale=chosen.scale, divide=chosen.divide
        )
    except DraftQuantError as exc:
        print(exc, file=sys.stderr)
        return 2
    print(chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
