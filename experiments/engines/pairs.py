"""What each engine's own config classes make of a draft beside a target: `pairs.json`.

`test_pair_engines.py` holds `check` to it.
No weight is read: the configs alone decide dtype, quantization and length of a draft. What is asked
stands in the file too: `case` holds what each config changes, and the flags of the server.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from asking import of_both, write_table

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
CASES: dict[str, dict[str, Any]] = {
    name: row["case"] for name, row in json.loads(OUT.read_text(encoding="utf-8")).items()
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


def main() -> int:
    """See the module."""
    if found := of_both(__file__, of_engine):
        rows = {
            name: {"case": case, **{engine: found[engine][name] for engine in found}}
            for name, case in CASES.items()
        }
        write_table(OUT, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
