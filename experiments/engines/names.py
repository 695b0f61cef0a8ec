"""Names, ropes and missing fc of published drafts: what each engine's own loader makes of them.

Usage: `.venv/bin/python experiments/engines/names.py .venv-engines/bin/python` writes `names.json`;
`test_names.py` holds `check` against it. The drafts are plain BF16 folders.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))  # tiny.py and its kin

import numpy as np  # noqa: E402
from cases import TARGET_FOLDER, write_target  # noqa: E402
from tiny import Stored, read_tensors, store, tiny_eagle3_llama, write_tensors  # noqa: E402
from tiny_dflash import tiny_dflash  # noqa: E402
from tiny_mla import tiny_eagle3_mla  # noqa: E402

OUT = HERE / "names.json"
ENGINES = ("vllm", "sglang")
_HIDDEN = 256
_SHAPE: dict[str, Any] = {"hidden": _HIDDEN, "intermediate": 512, "vocab": 512}
_LLAMA = {**_SHAPE, "heads": 8, "kv_heads": 4, "head_dim": 64, "pruned_vocabulary": True}
_MLA = {
    **_SHAPE,
    "heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DFLASH = {**_SHAPE, "heads": 8, "kv_heads": 4, "head_dim": 64, "num_layers": 2}
_LAST_STATE = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}
_NO_LAYERS = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": []}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SCALINGS: dict[str, Any] = {
    "llama3": _LLAMA3,
    "mrope": {"type": "mrope", "mrope_section": [16, 8, 8]},
    "mrope-default": {
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": [16, 8, 8],
    },
    "linear": {"type": "linear", "factor": 2.0},
    "dynamic-alpha": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    "dynamic-factor": {"type": "dynamic", "factor": 2.0},
    "yarn": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024},
}
_LLAMA_NAMES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "EAGLE3LlamaForCausalLM",
    "CosyVoice3Eagle3LlamaForCausalLM",
    "PEagleDraftModel",
)
_MLA_NAMES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
_TYPES = (
    *("apertus", "cohere", "deepseek_v2", "deepseek_v3", "deepseek_v32", "falcon", "gemma"),
    *("gemma2", "gemma3_text", "glm4", "gpt_oss", "internlm3", "kimi_k2", "llama", "longcat_flash"),
    *("minicpm3", "mistral", "mixtral", "no_such_type", "olmo2", "olmo3", "phi3", "qwen2", "qwen3"),
    *("qwen3_5_text", "qwen3_next", "starcoder2", "step3p5"),
)
"""Each as the model_type of a Llama draft, without and with the keys that its class fills in."""
_BLOCK_TYPES = ("gemma3_text", "gpt_oss", "llama", "qwen3_next")
_ABSENT = object()
_FILLED_IN = ("rope_theta", "rms_norm_eps", "tie_word_embeddings")


def write_drafts(out: Path) -> list[str]:
    """Write every draft into a folder of its own; returns their names."""

    def llama(name: str, *, config: dict[str, Any] | None = None, **options: Any) -> None:
        _write(tiny_eagle3_llama, out / name, _LLAMA | options.pop("shape", {}), config, **options)

    def mla(name: str, *, config: dict[str, Any] | None = None, **options: Any) -> None:
        _write(tiny_eagle3_mla, out / name, _MLA, config, **options)

    eagle31 = {"fc_norm": True, "norm_output": True}
    rooted = {"shape": {"prefix": "model.layers.0."}}
    for name in _LLAMA_NAMES:
        llama(f"name-{name}", config={"architectures": [name]})
    for name in _MLA_NAMES:
        mla(f"name-{name}", config={"architectures": [name]})
    for name, scaling in _SCALINGS.items():
        llama(f"rope-{name}", config={"rope_scaling": scaling})
    llama("rope-theta-absent", config={"rope_theta": _ABSENT})
    llama("rope-theta-null", config={"rope_theta": None})
    llama("eagle-3.1", config=eagle31, add=_fc_norms(""))
    llama("eagle-3.1-model-prefix", config=eagle31, add=_fc_norms("model."), **rooted)
    llama("model-prefix", **rooted)
    llama("no-fc", config={"eagle_config": _LAST_STATE}, drop=("fc.weight",))
    llama("no-layers", config={"eagle_config": _NO_LAYERS})
    mla("mla-eagle-3.1", config=eagle31, add=_fc_norms(""))
    mla("mla-model-prefix", rename=lambda n: n if n.startswith("lm_head") else f"model.{n}")
    mla("mla-no-fc", config={"eagle_config": _LAST_STATE}, drop=("fc.weight",))
    for spelling in ("torchspec", "draft_model", "dflash_module"):
        tiny_dflash(out / f"dflash-{spelling}", spelling=spelling, **_DFLASH)  # type: ignore[arg-type]
    for kind in _TYPES:
        llama(f"type-{kind}", config={"model_type": kind, "hidden_act": "silu"})
        llama(f"bare-{kind}", config={"model_type": kind, **dict.fromkeys(_FILLED_IN, _ABSENT)})
    for kind in ("gpt_oss", "mistral", "qwen3"):
        for key in ("num_key_value_heads", "head_dim"):
            llama(f"type-{kind}-no-{key}", config={"model_type": kind, key: _ABSENT})
    for kind in _BLOCK_TYPES:
        config = {"model_type": kind, "rope_theta": _ABSENT}
        _write(tiny_dflash, out / f"dflash-type-{kind}", _DFLASH, config)
    slides = {"layer_types": ["sliding_attention"], "sliding_window": 64}
    llama("sliding", config=slides)
    llama("sliding-no-window", config={**slides, "sliding_window": _ABSENT})
    _write(
        tiny_dflash,
        out / "dflash-no-mask",
        _DFLASH,
        {"dflash_config": {"target_layer_ids": [1, 2, 3]}},
    )
    for root in ("draft_model.", "eagle_module."):
        llama(f"{root}prefix", rename=lambda name, root=root: f"{root}{name}")
    return sorted(path.name for path in out.iterdir() if path.name != TARGET_FOLDER)


def _fc_norms(root: str) -> dict[str, Stored]:
    ones = store(np.ones(_HIDDEN, dtype=np.float32), "BF16")
    return {f"{root}fc_norm.{i}.weight": ones for i in range(3)}


def _write(
    builder: Callable[..., Path],
    folder: Path,
    shape: dict[str, Any],
    config: dict[str, Any] | None,
    *,
    add: dict[str, Stored] | None = None,
    drop: Iterable[str] = (),
    rename: Callable[[str], str] = lambda name: name,
) -> None:
    given = {key: value for key, value in (config or {}).items() if value is not _ABSENT}
    builder(folder, **shape, config=given)
    for key in (config or {}).keys() - given.keys():
        keys = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        keys.pop(key, None)
        (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    tensors = {**read_tensors(folder), **(add or {})}
    for name in drop:
        del tensors[name]
    write_tensors(folder, {rename(name): stored for name, stored in tensors.items()})


def main() -> int:
    """Ask both engines, on a faked sm90 in one shard."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_target(work / TARGET_FOLDER)
        drafts = [str(work / name) for name in write_drafts(work)]
        for engine in ENGINES:
            script = HERE / f"{engine}_loader.py"
            options = ["--target", str(work / TARGET_FOLDER), "--arch", "sm90", "--tp", "1"]
            command = [sys.argv[1], str(script), *options, "--debug", *drafts]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for line in filter(lambda text: text.startswith("{"), done.stdout.splitlines()):
                said = json.loads(line)
                row = {key: said[key] for key in ("verdict", "error", "unloaded")}
                rows.append(f'"{engine} {Path(said["draft"]).name}": {json.dumps(row)}')
    OUT.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
