"""What each engine's own config classes make of a draft beside a target: `pairs.json`.

`test_pair_engines.py` holds `check` to it.
No weight is read: the configs alone decide dtype, quantization and length of a draft.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent / "pairs.json"
SIZES = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}  # fmt: skip
TARGET = {**SIZES, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8,
          "torch_dtype": "bfloat16"}  # fmt: skip
DRAFT = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
         "draft_vocab_size": 96, "torch_dtype": "bfloat16"}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "factor": 2.0}
CT_FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
                              "symmetric": True, "dynamic": True},
    }},
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
Case = dict[str, Any]
CASES: dict[str, Case] = {
    "plain": {},
    "target in float16": {"target": {"torch_dtype": "float16"}},
    "draft in float16": {"draft": {"torch_dtype": "float16"}},
    "draft without a dtype": {"draft": {"torch_dtype": None}},
    "draft in float32": {"draft": {"torch_dtype": "float32"}},
    "--dtype float16": {"args": {"dtype": "float16"}},
    "longer target": {"target": {"max_position_embeddings": 4096}},
    "longer target, shorter service": {
        "target": {"max_position_embeddings": 4096},
        "args": {"context": 400},
    },
    "longer target, linear draft": {
        "target": {"max_position_embeddings": 4096},
        "draft": {"rope_scaling": LINEAR},
    },
    "target twice as long, linear draft": {
        "target": {"max_position_embeddings": 1024},
        "draft": {"rope_scaling": LINEAR},
    },
    "longer target, yarn draft": {
        "target": {"max_position_embeddings": 4096},
        "draft": {"rope_scaling": YARN},
    },
    "yarn target": {"target": {"rope_scaling": YARN}},
    "--quantization awq": {"args": {"quantization": "awq", "dtype": "float16"}},
    "--quantization fp8": {"args": {"quantization": "fp8"}},
    "draft in FP8, --quantization w8a8_fp8": {
        "draft": {"quantization_config": CT_FP8},
        "args": {"quantization": "w8a8_fp8"},
    },
    "draft in FP8, --quantization modelopt_fp4": {
        "draft": {"quantization_config": FP8},
        "args": {"quantization": "modelopt_fp4"},
    },
    "draft in FP8, --quantization awq": {
        "draft": {"quantization_config": FP8},
        "args": {"quantization": "awq"},
    },
    "draft in FP8": {"draft": {"quantization_config": FP8}},
    "target in FP8": {"target": {"quantization_config": FP8}},
}


def of_engine(engine: str) -> dict[str, Any]:
    """What it makes of every case: facts of the draft, or its error."""
    asked = _in_vllm if engine == "vllm" else _in_sglang
    found = {}
    with tempfile.TemporaryDirectory() as root:
        for name, case in CASES.items():
            folder = Path(root) / str(len(found))
            target = _written(folder / "target", TARGET, case.get("target", {}))
            draft = _written(folder / "draft", DRAFT, case.get("draft", {}))
            try:
                found[name] = asked(draft, target, case.get("args", {}))
            except ValueError as exc:
                found[name] = {"error": str(exc).replace("\n", " ")}
    return found


def _written(folder: Path, config: dict[str, Any], changes: dict[str, Any]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return str(folder)


def _in_vllm(draft: str, target: str, args: dict[str, Any]) -> dict[str, Any]:
    """--quantization is the target's, which has no such weights here, and is not given to it."""
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    beside = ModelConfig(
        model=target,
        dtype=args.get("dtype", "auto"),
        max_model_len=args.get("context"),
        skip_tokenizer_init=True,
    )
    asked = SpeculativeConfig(
        model=draft,
        method="eagle3",
        num_speculative_tokens=3,
        target_model_config=beside,
        target_parallel_config=ParallelConfig(),
    )
    own = asked.draft_model_config
    return {
        "dtype": str(own.dtype).removeprefix("torch."),
        "quantization": own.quantization,
        "positions": own.hf_config.max_position_embeddings,
        "length": own.max_model_len,
        "served": beside.max_model_len,
    }


def _in_sglang(draft: str, target: str, args: dict[str, Any]) -> dict[str, Any]:
    """As `ModelConfig.from_server_args` is called for the target, and then for its draft."""
    from sglang.srt.configs.model_config import ModelConfig

    dtype = args.get("dtype", "auto")
    served = ModelConfig(
        model_path=target, dtype=dtype, context_length=args.get("context")
    ).context_len
    own = ModelConfig(
        model_path=draft,
        dtype=dtype,
        quantization=args.get("quantization"),
        context_length=served,
        is_draft_model=True,
    )
    return {
        "dtype": str(own.dtype).removeprefix("torch."),
        "quantization": own.quantization,
        "length": own.context_len,
        "served": served,
    }


def _install(engine: str) -> None:
    if engine == "vllm":
        os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR")
        import vllm_platform

        vllm_platform.install("sm90")
    else:
        import sglang_platform

        sglang_platform.install("sm90")


def main() -> int:
    """See the module."""
    if len(sys.argv) > 1:
        _install(sys.argv[1])
        print(json.dumps(of_engine(sys.argv[1])))
        return 0
    found = {}
    for engine in ("vllm", "sglang"):
        command = [sys.executable, __file__, engine]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[engine] = json.loads(done.stdout.splitlines()[-1])
    rows = [
        json.dumps(name)
        + ": "
        + json.dumps({"case": case, **{engine: found[engine][name] for engine in found}})
        for name, case in CASES.items()
    ]
    OUT.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
