"""What transformers and both engines read of the rope keys of a config.json: `rope_readings.json`.

Asked are the published drafts of tests/wild and 300 drawn ones: transformers' own config class and
rotary embedding of Llama, and the modules that each engine builds for such a draft. `test_rope.py`
holds draftquant's reader against them.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asking import HERE, of_both

OUT = HERE / "rope_readings.json"
WILD = HERE.parents[1] / "tests" / "wild" / "drafts.json"
READERS = ("transformers", "vllm", "sglang")
NUM_DRAWN = 300
MOST_POSITIONS = 2048
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 96, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "num_hidden_layers": 1,
    "max_position_embeddings": MOST_POSITIONS, "torch_dtype": "float32",
}  # fmt: skip
TARGET = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
          "num_hidden_layers": 8}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 96},
    "dflash": {
        "architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 8,
        "dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 5},
    },
    "latent": {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "draft_vocab_size": 96,
        "q_lora_rank": 48, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
        "v_head_dim": 32, "moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    },
    "model": {"architectures": ["LlamaForCausalLM"]},
}  # fmt: skip
TYPES = {
    "eagle3": ("llama",) * 6
    + ("qwen3", "glm4_moe", "nemotron", "gpt_oss", "cohere2", "gemma3_text"),
    "dflash": ("qwen3",) * 4 + ("llama", "gemma3_text"),
    "latent": ("kimi_k2",),
    "model": ("llama",),
}
METHODS = {"dflash": "dflash", "model": "draft_model"}
PUBLISHED = {
    "eagle3-llama": "eagle3", "eagle3-mla": "latent", "peagle": "eagle3", "dflash": "dflash",
    "dflash2": "dflash", "dspark": "dflash", "domino": "dflash", "causal-lm": "model",
}  # fmt: skip
"""Kinds of tests/wild whose layers are those of a kind here; "listed" ones say so in `like`."""
ROPE_KEYS = (
    "model_type", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "max_position_embeddings", "original_max_position_embeddings", "layer_types",
)  # fmt: skip
Case = dict[str, Any]


def config_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a case: sizes of its kind, and the keys that the case is about."""
    keys = {key: value for key, value in case.items() if key != "kind"}
    return {**SIZES, **KINDS[case["kind"]], **keys}


def wild_cases() -> dict[str, Case]:
    """Every published draft with layers of these kinds: its rope keys in a small draft."""
    found = {}
    for entry in json.loads(WILD.read_text(encoding="utf-8")):
        config, tensors = entry["config"], entry["tensors"]
        kind = PUBLISHED.get(tensors["kind"], tensors.get("like"))
        keys = {**config, **config.get("transformer_layer_config", {})}
        if kind is not None:
            asked = {key: keys[key] for key in ROPE_KEYS if key in keys and key != "layer_types"}
            asked["model_type"] = _known(asked["model_type"])
            found[entry["draft"]] = {"kind": kind, **_as_small(asked)}
    return found


def _known(model_type: str) -> str:
    """A type that nobody knows, or not of such layers, as one that has the same rope."""
    same = {"dflash": "qwen3", "laguna": "qwen3", "glm_moe_dsa": "kimi_k2", "k3_dspark": "kimi_k2"}
    return same.get(model_type, model_type)


def _as_small(keys: Case) -> Case:
    """Sections of mrope add up to the pairs of a head, which has 16 here."""
    section = dict(keys.get("rope_scaling") or {})
    if "mrope_section" in section:
        section["mrope_section"] = [4, 6, 6]
    return {**keys, "rope_scaling": section} if section else keys


def drawn_case(seed: int) -> Case:
    """Any of the spellings, each alone or against another."""
    r = random.Random(seed)
    kind = r.choice(("eagle3", "eagle3", "eagle3", "dflash", "dflash", "latent", "model"))
    case: Case = {"kind": kind, "model_type": r.choice(TYPES[kind])}
    scaling = _scaling(r)
    if r.random() < 0.5:
        case["rope_theta"] = r.choice((10000, 5e5, 1e6, None if r.random() < 0.3 else 640000.0))
    if r.random() < 0.5:
        scaling["rope_theta"] = r.choice((10000.0, 2e6, 1e7, None if r.random() < 0.3 else 5e6))
    if r.random() < 0.2:
        (case if r.random() < 0.5 else scaling)["partial_rotary_factor"] = r.choice(
            (0.25, 0.5, 1.0)
        )
    if r.random() < 0.05:
        scaling["rope_dim"] = 16
    if r.random() < 0.12:
        case["original_max_position_embeddings"] = r.choice((100, 300))
    if r.random() < 0.12:
        kinds = ("full_attention", "sliding_attention")
        scaling = {name: {**scaling, "rope_theta": r.choice((1e4, 1e6))} for name in kinds}
        if r.random() < 0.5:
            case["layer_types"] = [r.choice(kinds)]
    places = r.choice(
        (("rope_scaling",), ("rope_parameters",), ("rope_scaling", "rope_parameters"))
    )
    for place in places:
        case[place] = scaling
    if len(places) == 2:
        other = r.choice((None, {}, {"rope_type": "default", "rope_theta": 3e6}))
        case[r.choice(places)] = other
    return case


def _scaling(r: random.Random) -> Case:
    kind = r.choice((None, "default", "default", "linear", "dynamic", "alpha", "yarn", "yarn",
                     "yarn", "llama3", "longrope", "su", "ntk", "mrope", "proportional",
                     "other"))  # fmt: skip
    original = {"original_max_position_embeddings": r.choice((64, 200, 500))}
    found: Case = {"rope_type": kind}
    match kind:
        case None:
            return {}
        case "linear" | "dynamic" | "ntk":
            found["factor"] = r.choice((2.0, 8.0))
        case "alpha":
            found = {"rope_type": "dynamic", "alpha": r.choice((50.0, 1000.0)), "factor": 1.0}
        case "yarn":
            found |= {"factor": r.choice((4.0, 8.0)), **_yarn(r)}
            found |= original if r.random() < 0.8 else {}
        case "llama3":
            found |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            found |= original if r.random() < 0.8 else {}
        case "longrope" | "su":
            found |= {"short_factor": [1.0 + i / 16 for i in range(16)], **original}
            found["long_factor"] = [2.0 + i / 4 for i in range(16)]
    if kind == "mrope" or r.random() < 0.08:
        found["mrope_section"] = [4, 6, 6]
    spelled = r.random()
    if spelled < 0.25:
        found["type"] = found.pop("rope_type")
    elif spelled < 0.35:
        found["type"] = found["rope_type"] if r.random() < 0.7 else "linear"
    return found


def _yarn(r: random.Random) -> Case:
    extras: Case = {
        "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5,
        "attention_factor": 1.5, "attn_factor": 1.25, "truncate": False,
    }  # fmt: skip
    return {key: value for key, value in extras.items() if r.random() < 0.15}


def cases() -> Iterator[tuple[str, Case]]:
    """Name -> case, in the order of the file."""
    yield from wild_cases().items()
    for seed in range(NUM_DRAWN):
        yield str(seed), drawn_case(seed)


# ---- The three readers


def answers(reader: str) -> dict[str, Any]:
    """What a reader makes of every case: base, frequencies and their factor, or its error."""
    import torch

    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as root:
        target = _written(Path(root) / "target", TARGET | {"torch_dtype": "bfloat16"})
        for name, case in cases():
            folder = _written(Path(root) / str(len(found)), config_of(case))
            try:
                rope = _READ[reader](folder, target, METHODS.get(case["kind"], "eagle3"))
                found[name] = _facts(rope)
            except Exception as exc:  # noqa: BLE001  whatever it raises is its answer
                lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or [""]
                text = lines[1] if len(lines) > 1 and "validation error" in lines[0] else lines[0]
                found[name] = {"refused": f"{type(exc).__name__}: {text[:90]}"}
    return found


def _written(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _facts(rope: Any) -> dict[str, Any]:
    """Of the tables of cos and sin, the angles at position 1: every second frequency."""
    import torch

    table = getattr(rope, "cos_sin_cache", None)
    if table is None:
        table = rope.long_short_cos_sin_cache
    cos, sin = table[1].float().chunk(2)
    angles = torch.atan2(sin, cos)
    return {
        "theta": float(rope.base),
        "rotated": 2 * len(angles),
        "factor": float(f"{torch.hypot(cos, sin)[0]:.5g}"),
        "frequencies": [float(f"{angle:.4g}") for angle in angles[::2].tolist()],
    }


def _transformers(folder: Path, _target: Path, _method: str) -> Any:
    """Its config class, and Llama's rotary embedding, with which such drafts are trained."""
    import torch
    from transformers import CONFIG_MAPPING
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = {"kimi_k2": "deepseek_v3"}.get(said["model_type"], said["model_type"])
    config = CONFIG_MAPPING[name].from_dict({**said, "model_type": name})
    if name == "deepseek_v3":
        config.head_dim = config.qk_rope_head_dim
    found = LlamaRotaryEmbedding(config)
    angles, factor = found.inv_freq, found.attention_scaling
    rows = torch.stack([angles * 0, angles])
    table = torch.cat([rows.cos() * factor, rows.sin() * factor], dim=-1)
    return SimpleNamespace(base=config.rope_parameters["rope_theta"], cos_sin_cache=table)


def _vllm(folder: Path, target: Path, method: str) -> Any:
    import torch
    import vllm_platform
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm_loader import of_its_own, speculating

    config = speculating(target, "cpu", model=str(folder), method=method, num_speculative_tokens=3)
    vllm_platform.become_rank(1, 0)
    draft = config.speculative_config.draft_model_config
    config = of_its_own(config) if method == "draft_model" else config
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        return _rope_in(initialize_model(vllm_config=config, model_config=draft, prefix="draft"))


def _sglang(folder: Path, _target: Path, _method: str) -> Any:
    import sglang_platform
    from sglang.srt.configs.model_config import ModelConfig
    from sglang_loader import building

    sglang_platform.publish_server_arguments(1)
    sglang_platform.become_rank(1, 0)
    config = ModelConfig(str(folder), is_draft_model=True, dtype="float32")
    return _rope_in(building(config, folder)())


def _rope_in(model: Any) -> Any:
    return next(m for name, m in model.named_modules() if name.endswith("rotary_emb"))


_READ = {"transformers": _transformers, "vllm": _vllm, "sglang": _sglang}


def rows(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each case: what is equal of several readers stands there once."""
    for name, case in cases():
        said: dict[str, Any] = {}
        for reader in READERS:
            same = (who for who, what in said.items() if what == found[reader][name])
            if (who := next(same, None)) is not None:
                said[f"{who} {reader}"] = said.pop(who)
            else:
                said[reader] = found[reader][name]
        row = {"name": name, **case, "read": said}
        yield json.dumps(row, separators=(",", ":"))


def main() -> int:
    """See the module."""
    if found := of_both(__file__, answers, READERS):
        OUT.write_text("[\n" + ",\n".join(rows(found)) + "\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
