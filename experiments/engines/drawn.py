"""Folders drawn at random: families x tools' declarations x excludes x layers x norms x keys.

`experiments/run drawn` draws `COUNT` folders, asks both engines' loaders, and prints every answer
that `check` does not give. `--write` keeps the answers in drawn.json, beside a digest of what was
drawn: a folder is drawn again from its number. Exit status 1: `check` says of a folder that it
loads, and it does not.
"""

import argparse
import copy
import fnmatch
import functools
import json
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import tiny_shapes as shapes  # noqa: E402
from draftquant.quantize.engines.declared_forms import read_declaration  # noqa: E402
from draftquant.quantize.files.checkpoint import Checkpoint  # noqa: E402
from folder_rows import asked_again, predictions, read_rows  # noqa: E402
from tiny_mla import MODELOPT_EXTRAS  # noqa: E402
from tiny_shapes import Shapes  # noqa: E402

FILE = HERE / "drawn.json"
COUNT = 320
PLATFORMS = ("vllm sm90 1", "sglang sm90 1")
TOOLS = (
    "*compressed-tensors--W4A16", "*llm-compressor--FP8_DYNAMIC", "*llm-compressor--w4-channel",
    "*oneshot--W8A8", "*oneshot--NVFP4", "*llm-compressor--NVFP4A16", "*oneshot--FP8_BLOCK",
    "*modelopt--FP8_DEFAULT_CFG", "*modelopt--NVFP4_DEFAULT_CFG", "*modelopt--W4A16_NVFP4_CFG",
    "*modelopt--FP8_PER_CHANNEL_PER_TOKEN_CFG", "*quark--file-ptpc_fp8", "*quark--file-int4_wo_128",
    "*autoawq--gemm-128",
)  # fmt: skip
"""Rows of foreign_sample.json whose declarations are given to other drafts."""
KEYS: Mapping[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "attention_bias": False,
}  # fmt: skip
LATENT: Mapping[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 128,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, **MODELOPT_EXTRAS,
}  # fmt: skip
MIXTURE: Mapping[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
GATED_ROPE: Mapping[str, Any] = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    "mrope_section": [3, 3, 2], "mrope_interleaved": True,
}  # fmt: skip
VISION: Mapping[str, Any] = {
    "depth": 1, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 256,
    "num_position_embeddings": 64,
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"
Drawing = tuple[dict[str, Any], Shapes]


# ---- The draft before it is quantized


def _rope(random: Random, config: dict[str, Any]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config |= random.choice([
        {"rope_theta": 1e6}, {"rope_theta": 1e6}, {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": None}, {"rope_theta": 1e6, "rope_scaling": yarn},
    ])  # fmt: skip


def _vocabulary(random: Random, config: dict[str, Any], *, cut: bool) -> list[str]:
    """The tables that a draft stores, and the keys about them."""
    has = [name for name in ("embed_tokens", "lm_head") if random.random() < 0.75]
    if cut and random.random() < 0.5:
        config["draft_vocab_size"] = 256
        return [*has, "d2t", *(["t2d"] if random.random() < 0.7 else [])]
    config |= random.choice([{}, {"draft_vocab_size": 512}, {"draft_vocab_size": None}])
    return has


def _eagle3(random: Random, *, latent: bool) -> Drawing:
    normed = not latent and random.random() < 0.25
    name = "Eagle3DeepseekV2ForCausalLM" if latent else "LlamaForCausalLMEagle3"
    model_type = "kimi_k2" if latent else random.choice(["llama", "llama", "qwen3"])
    config = {**KEYS, **(LATENT if latent else {}), "model_type": model_type}
    config |= {"architectures": ["Eagle3Qwen3ForCausalLM" if normed else name]}
    config["num_hidden_layers"] = layers = random.choice([1, 1, 2, 3])
    has = _vocabulary(random, config, cut=True)
    _rope(random, config)
    config |= random.choice([
        {}, {IDS: [2, 4, 5]}, {"eagle_config": {IDS: [1, 3, 4]}}, {"num_aux_hidden_states": 3},
        {IDS: [2, 4, 5], "eagle_config": {IDS: [1, 3, 4]}}, {"eagle_config": {IDS: [1, 4]}},
        {"eagle_config": {"use_aux_hidden_state": False}},
        {"eagle_config": {"use_aux_hidden_state": True}}, {"target_hidden_size": 256},
    ])  # fmt: skip
    config |= random.choice([{}, {}, {"norm_before_residual": True}, {"norm_output": True}])
    option = random.choice(["", "", "", "fc_norm", "norm_before_fc"])
    config |= {option: True} if option else {}
    has += [{"norm_before_fc": "input_norm"}.get(option, option)] if option else []
    has += ["qk_norm"] if normed else []
    first = random.choice(["midlayer.", "layers.0."]) if layers == 1 else "layers.0."
    ids = config.get("eagle_config", {}).get(IDS)
    width = 256 * (len(ids) if ids else 3)
    has = [name for name in has if name != "fc_norm" or width == 768]
    found = shapes.eagle3(config, has, first, latent=latent, features=width)
    for i in range(1, layers):  # exporters call the norm of a later layer's input by either name
        stored = random.choice([["input_layernorm"], ["hidden_norm"], None])
        for norm in ("input_layernorm", "hidden_norm"):
            found[f"layers.{i}.{norm}.weight"] = (256,)
            if stored is not None and norm not in stored:
                del found[f"layers.{i}.{norm}.weight"]
    if config.get("eagle_config") == {"use_aux_hidden_state": False} and random.random() < 0.5:
        del found["fc.weight"]
    return config, found


def _block(random: Random, kind: str) -> Drawing:
    layers, ids = random.choice([1, 2, 3]), [1, 3, 5]
    section: dict[str, Any] = {"mask_token_id": 511, "target_layer_ids": ids}
    config: dict[str, Any] = {
        **KEYS, "model_type": "qwen3", "num_hidden_layers": layers, "block_size": 8,
        "num_target_layers": 8, "dflash_config": section,
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "Qwen3DSparkModel"],
    }  # fmt: skip
    has = _vocabulary(random, config, cut=kind == "dflash") if random.random() < 0.3 else []
    _rope(random, config)
    config |= random.choice([{}, {"layer_types": ["full_attention"] * layers}])
    if random.random() < 0.3 and kind == "dflash":  # as ModelOpt exports Nemotron's
        config |= {"has_embed_tokens": True, IDS: [i + 1 for i in ids]}
        section["sample_from_anchor"] = False
        has = ["embed_tokens"]
    if kind == "dflash":
        return config, shapes.dflash(config, has, features=768)
    config |= {"markov_rank": 128, "markov_head_type": "vanilla", "enable_confidence_head": True}
    found = shapes.dflash(config, has, features=768) | shapes.dspark(config, 128)
    return config, found


def _whole(random: Random) -> Drawing:
    config = {**KEYS, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"num_hidden_layers": random.choice([1, 2]), "rope_theta": 1e6}
    tied = config["tie_word_embeddings"] = random.random() < 0.3
    has = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    return config, shapes.causal_lm(config, has)


def _mtp(random: Random, kind: str) -> Drawing:
    """An MTP layer in its target, of which one linear stands for all."""
    config: dict[str, Any] = {**KEYS, "num_hidden_layers": 2}
    keys, root = config, "model."
    experts = 0 if kind == "qwen3_5" else 4
    if kind in ("qwen3_5", "qwen3_5_moe"):
        keys = {
            **config, "model_type": f"{kind}_text", "attn_output_gate": True,
            "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
            "rope_parameters": GATED_ROPE, "layer_types": ["full_attention"] * 2,
            **(MIXTURE if experts else {}),
        }  # fmt: skip
        name = f"Qwen3_5{'Moe' if experts else ''}ForConditionalGeneration"
        config = {"architectures": [name], "model_type": kind, "text_config": keys}
        config["vision_config"] = VISION
        found, root = shapes.qwen3_next_mtp(keys, experts), "model.language_model."
    elif kind == "qwen3_next":
        config |= {
            **MIXTURE, "architectures": ["Qwen3NextForCausalLM"], "model_type": kind,
            "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "layer_types": ["full_attention"] * 2,
        }  # fmt: skip
        found = shapes.qwen3_next_mtp(config, experts)
    else:
        config |= {
            "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_group": 2,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
            "n_shared_experts": 1, "topk_group": 1, "norm_topk_prob": True, "use_qk_norm": False,
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 0, "rope_theta": 1e6,
            "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
        }  # fmt: skip
        own = shapes.nextn(config, shapes.attention(config, 256), experts)
        found = shapes.named("model.layers.2.", own)
        found = {n.replace("_bias.weight", "_bias"): shape for n, shape in found.items()}
    if experts and kind.startswith("qwen") and random.random() < 0.4:
        found = _stacked(found)
    if random.random() < 0.15:  # the quantizer kept only some of it
        found = {n: s for n, s in found.items() if random.choice([".mlp.", ".self_attn."]) not in n}
    body = {f"{root}embed_tokens.weight": (512, 256), "lm_head.weight": (512, 256)}
    return config, {**found, **body, f"{root}layers.0.mlp.down_proj.weight": (256, 512)}


def _stacked(found: Shapes) -> Shapes:
    """Experts as Transformers saves them: those of a layer in one tensor."""
    kept = {name: shape for name, shape in found.items() if ".experts." not in name}
    layer = next(name for name in found if ".experts." in name).partition("experts.")[0]
    return kept | {
        f"{layer}experts.gate_up_proj": (4, 256, 256),
        f"{layer}experts.down_proj": (4, 256, 128),
    }


DRAFTS = {
    "eagle3": lambda random: _eagle3(random, latent=False),
    "eagle3-mla": lambda random: _eagle3(random, latent=True),
    "dflash": lambda random: _block(random, "dflash"),
    "dspark": lambda random: _block(random, "dspark"),
    "language-model": _whole,
    "qwen3_5": lambda random: _mtp(random, "qwen3_5"),
    "qwen3_5_moe": lambda random: _mtp(random, "qwen3_5_moe"),
    "qwen3_next": lambda random: _mtp(random, "qwen3_next"),
    "glm4_moe": lambda random: _mtp(random, "glm4_moe"),
}
SHARES = (6, 3, 4, 2, 1, 2, 4, 2, 2)
"""How often each of them is drawn."""


# ---- A tool's declaration, and what it stores


@functools.cache
def _declarations() -> Sequence[tuple[str, Mapping[str, Any]]]:
    return [
        (row["draft"].rpartition("/")[2], row["config"]["quantization_config"])
        for row in read_rows()
        if any(fnmatch.fnmatch(row["draft"], tool) for tool in TOOLS)
    ]


def _linears(found: Shapes) -> list[str]:
    marks = ("_proj.weight", "fc.weight", "lm_head.weight")
    names = (n for n, shape in found.items() if n.endswith(marks) and len(shape) == 2)
    return [n.removesuffix(".weight") for n in names if "confidence" not in n]


def _quantized(
    random: Random, config: dict[str, Any], found: Shapes, inside: str
) -> dict[str, Any]:
    """Headers of the folder; its config.json gets the declaration.

    Of one that draftquant does not decode there are none: the engine itself is to be asked.
    """
    tool, declared = random.choice([("BF16", {}), *_declarations()])
    dtype = "F16" if tool.startswith("autoawq") else random.choice(["BF16"] * 6 + ["F16", "F32"])
    config["torch_dtype"] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]
    usual = {"d2t": "I64", "t2d": "BOOL"}
    plain = {name: [usual.get(name, dtype), *shape] for name, shape in found.items()}
    if not declared:
        return plain
    linears = _linears(found)
    kept = {n for n in linears if n.endswith(("fc", "lm_head", "kv_b_proj", "eh_proj"))}
    if random.random() < 0.3:  # beyond the layers
        kept -= {random.choice(sorted(kept))} if kept else set()
    kept |= {"lm_head"} if inside else set()  # in a target's folder it is the target's
    if inside and random.random() < 0.6:  # the layer itself is left as it was
        kept |= {name for name in linears if name.startswith(inside)}
    elif random.random() < 0.25:
        ends = random.choice(
            [("down_proj",), ("o_proj",), ("q_proj", "k_proj", "v_proj"), ("k_proj",)]
        )
        kept |= {name for name in linears if name.endswith(ends)}
    declared = copy.deepcopy(dict(declared))
    key = next(k for k in ("ignore", "exclude", "modules_to_not_convert") if k in declared)
    declared[key] = _excludes(random, sorted(kept), tool, inside=bool(inside))
    config["quantization_config"] = declared
    read = read_declaration(
        Checkpoint(folder=HERE, config=config, tensors={}, headers={}, index=None)
    )
    assert read is not None
    if not read.groups:
        return {}
    scheme = read.groups[0].scheme
    for name in [name for name in linears if name not in kept]:
        rows, columns = found[f"{name}.weight"]
        del plain[f"{name}.weight"]
        for suffix, part in scheme.parts(rows, columns).items():
            if suffix != "g_idx" and "zero_point" not in suffix:
                floats = dtype if dtype in part.dtypes and part.shape not in ((), (1,)) else "F32"
                plain[f"{name}.{suffix}"] = [
                    floats if "F32" in part.dtypes else part.dtypes[0], *part.shape
                ]  # fmt: skip
    return plain


def _excludes(random: Random, kept: Sequence[str], tool: str, *, inside: bool) -> list[str]:
    """Names as tools spell them; now and then some are missing."""
    ends = sorted({name.rpartition(".")[2] for name in kept})
    if "llm-compressor" in tool or "oneshot" in tool or "compressed" in tool:
        wild = [f"re:.*{end}$" for end in ends]
    else:
        wild = [f"*{end}*" for end in ends] if "awq" not in tool else ends
    spelled = random.choice([list(kept), list(kept), wild, wild, ends])
    if spelled and random.random() < 0.15:
        spelled = [each for each in spelled if each != random.choice(spelled)]
    named = random.random() < 0.7 or inside
    return sorted({*spelled, "lm_head"} if named else {*spelled})


def drawn(number: int) -> dict[str, Any]:
    """A folder as a row of `folder_rows`."""
    random = Random(f"form {number}")
    (kind,) = random.choices(list(DRAFTS), SHARES)
    config, found = DRAFTS[kind](random)
    inside = {"glm4_moe": "model.layers.2"}.get(kind, "mtp") if kind[:3] in ("qwe", "glm") else ""
    tensors = _quantized(random, config, found, inside)
    scalars = [n for n in tensors if n.endswith(("weight_scale_2", "weight_global_scale"))]
    return {
        "draft": f"{number} {kind}", "config": config, "side_file": False, "tensors": tensors,
        "values": dict.fromkeys(scalars, "0ad7233c"), "answers": {},
        **({"subtree": inside} if inside else {}),
    }  # fmt: skip


def digest(row: Mapping[str, Any]) -> int:
    """Of everything that was drawn."""
    return zlib.crc32(json.dumps([row["config"], row["tensors"]], sort_keys=True).encode())


def kept_rows() -> list[dict[str, Any]]:
    """The drawn folders with what the loaders said of them."""
    said = json.loads(FILE.read_text(encoding="utf-8"))
    whole = ({**drawn(number), **each} for number, each in enumerate(said))
    return [row for row in whole if row["tensors"]]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numbers", type=int, nargs=2, default=(0, COUNT))
    parser.add_argument("--platforms", nargs="+", default=PLATFORMS)
    parser.add_argument("--write", action="store_true", help="keep what is answered today")
    given = parser.parse_args()
    rows = [row for row in map(drawn, range(*given.numbers)) if row["tensors"]]
    asked = [{**row, "answers": {"": list(given.platforms)}} for row in rows]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as work:
        again = asked_again(asked, Path(work))
        for row in again:
            for place, told, said in predictions(row, Path(work) / "checked"):
                counts[f"{said.verdict}, loader {told}"] += 1
                if said.verdict != told:
                    print(
                        f"{row['draft']} {place}: check {said.verdict}, loader {told}: {said.error}"
                    )
    print(json.dumps(counts, indent=1))
    if given.write:
        lines = (json.dumps({"digest": digest(r), "answers": r["answers"]}) for r in again)
        FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return int(any(key.startswith("LOADS, ") and not key.endswith("r LOADS") for key in counts))


if __name__ == "__main__":
    sys.exit(main())
