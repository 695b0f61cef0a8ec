"""Folders of other tools' kinds, imitated by hand, and what each engine's own loader makes of them.

`kinds.json` has rows as foreign_sample.json does; `test_engine_kinds.py` holds `check` against it.
With `--count` it asks nobody, and prints which answers of `kinds.json` `check` does not give.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests"), str(HERE / "foreign")]

import foreign_sample  # noqa: E402
import kind_formats as formats  # noqa: E402
import numpy as np  # noqa: E402
from draftquant.recipes import DraftQuantError  # noqa: E402
from drafts import TARGET_FOLDER, write_target  # noqa: E402
from tiny import Stored, edit_json, read_tensors, store, tiny_eagle3_llama, write_tensors  # noqa: E402
from tiny_dflash import tiny_dflash  # noqa: E402
from tiny_dspark import tiny_dspark  # noqa: E402
from tiny_llama import tiny_language_model  # noqa: E402
from tiny_mla import tiny_eagle3_mla  # noqa: E402

OUT = HERE / "kinds.json"
PLATFORMS = (("vllm", "sm90"), ("sglang", "sm90"), ("sglang", "sm100"), ("sglang", "gfx942"))
_HIDDEN, _VOCAB = 256, 512
_SHAPE: dict[str, Any] = {"hidden": _HIDDEN, "intermediate": 512, "vocab": _VOCAB}
_HEADS: dict[str, Any] = {**_SHAPE, "heads": 4, "kv_heads": 2, "head_dim": 64}
_MLA = {
    **_SHAPE,
    "heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DRAFTS: Mapping[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "e3": (tiny_eagle3_llama, _HEADS | {"pruned_vocabulary": True}),
    "e3-whole": (tiny_eagle3_llama, _HEADS),
    "mla": (tiny_eagle3_mla, _MLA | {"pruned_vocabulary": True}),
    "mla-whole": (tiny_eagle3_mla, _MLA),
    "dflash": (tiny_dflash, _HEADS | {"num_layers": 2}),
    "dspark": (tiny_dspark, _HEADS | {"num_layers": 2, "rank": 128}),
    "lm": (tiny_language_model, _HEADS | {"num_layers": 2}),
    "lm-tied": (tiny_language_model, _HEADS | {"num_layers": 2, "tied": True}),
    "qwen2": (tiny_language_model, _HEADS | {"num_layers": 2, "kind": "Qwen2"}),
    "qwen3": (tiny_language_model, _HEADS | {"num_layers": 2, "kind": "Qwen3"}),
}
_NEVER = ("embed_tokens", "lm_head", "fc", "markov", "confidence", "joint_proj", "gate_proj_0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One folder.

    Attributes:
        draft: of `DRAFTS`.
        stored: how its linears are stored; None as floats.
        declared: its quantization_config.
        config: changes of config.json; None removes a key. nulls: keys that are null.
        arguments: of the builder, besides.
        kept: parts of the names of linears that are not quantized, beside tables and fc.
        edit: of all tensors.
    """

    draft: str
    stored: formats.Store | None = None
    declared: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    edit: Callable[[dict[str, Stored]], dict[str, Stored]] = lambda tensors: tensors


def _tensor(*shape: int, dtype: str = "BF16") -> Stored:
    return store(np.random.default_rng(7).standard_normal(shape, dtype=np.float32), dtype)


def _with(**more: Stored) -> Callable[[dict[str, Stored]], dict[str, Stored]]:
    return lambda tensors: {**tensors, **more}


def _without(*parts: str) -> Callable[[dict[str, Stored]], dict[str, Stored]]:
    return lambda tensors: {
        name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)
    }


def _beside(leaf: str, suffixes: Mapping[str, Stored]) -> Callable[..., dict[str, Stored]]:
    """Tensors beside each linear of a name: `...k_proj` -> `...` + suffix."""

    def edit(tensors: dict[str, Stored]) -> dict[str, Stored]:
        roots = {n.rpartition(leaf)[0] for n in tensors if f"{leaf}." in n}
        return tensors | {f"{r}{s}": tensor for r in roots for s, tensor in suffixes.items()}

    return edit


def _biases(*leaves: str) -> Callable[[dict[str, Stored]], dict[str, Stored]]:
    """A bias for each linear of these names."""

    def edit(tensors: dict[str, Stored]) -> dict[str, Stored]:
        found = dict(tensors)
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            if module != name and module.endswith(leaves):
                found[f"{module}.bias"] = _tensor(tensor.shape[0])
        return found

    return edit


_IDENTITY = {
    "d2t": Stored("I64", (_VOCAB,), np.zeros(_VOCAB, np.int64).tobytes()),
    "t2d": Stored("BOOL", (_VOCAB,), np.ones(_VOCAB, np.bool_).tobytes()),
}
_D2T32 = Stored("I32", (_VOCAB // 2,), np.arange(_VOCAB // 2, dtype=np.int32).tobytes())
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_TIED = {"tie_word_embeddings": True}
_SCALE = store(np.full((1,), 0.02), "F32")
_KV = {"k_scale": _SCALE, "v_scale": _SCALE}


def plain_kinds() -> Iterator[tuple[str, Kind]]:
    """Unquantized folders: ties, maps of the vocabulary, biases, numbers of layers, sizes."""
    for draft in ("e3", "e3-whole", "mla", "mla-whole"):
        yield f"{draft}-tied", Kind(draft=draft, config=_TIED)
    yield "e3-tied-no-head", Kind(draft="e3-whole", config=_TIED, edit=_without("lm_head"))
    yield "lm-tied-head", Kind(draft="lm", config=_TIED)
    yield "qwen3-tied-head", Kind(draft="qwen3", config=_TIED)
    for draft in ("e3-whole", "mla-whole"):
        yield f"{draft}-d2t", Kind(draft=draft, edit=_with(**_IDENTITY))
        no_size = {"draft_vocab_size": None}
        yield f"{draft}-d2t-no-size", Kind(draft=draft, config=no_size, edit=_with(**_IDENTITY))
    yield "e3-d2t-int32", Kind(draft="e3", edit=_with(d2t=_D2T32))
    for draft in ("lm", "e3", "qwen3", "dflash"):
        bias = {"attention_bias": True}
        yield f"{draft}-attention-bias", Kind(draft=draft, config=bias, edit=_biases(*_ATTENTION))
    for draft in ("lm", "e3", "qwen2", "dflash"):
        bias = {"mlp_bias": True}
        yield f"{draft}-mlp-bias", Kind(draft=draft, config=bias, edit=_biases(*_MLP))
    both = {"attention_bias": True, "mlp_bias": True}
    yield "lm-both-biases", Kind(draft="lm", config=both, edit=_biases(*_ATTENTION, *_MLP))
    for draft in ("lm", "e3", "dflash"):
        for key in ("attention_bias", "mlp_bias"):
            yield f"{draft}-no-{key.replace('_', '-')}", Kind(draft=draft, config={key: True})
    for draft in ("lm", "qwen2", "qwen3", "e3-whole"):
        odd = _HEADS | {"head_dim": 32} | ({"num_layers": 2} if draft != "e3-whole" else {})
        yield f"{draft}-head-dim", Kind(draft=draft, arguments=odd)
    for draft in ("lm", "qwen2", "qwen3", "e3-whole"):
        odd = {"hidden": 320, "heads": 6}
        yield f"{draft}-odd-heads", Kind(draft=draft, arguments=odd)
    for draft, layers in (("e3", 24), ("e3-whole", 36), ("mla", 61), ("dflash", 36)):
        yield f"{draft}-layers", Kind(draft=draft, config={"num_hidden_layers": layers})
    types = {"num_hidden_layers": 36, "layer_types": ["full_attention"] * 36}
    yield "dflash-layers-typed", Kind(draft="dflash", config=types)
    yield "e3-layers-typed", Kind(draft="e3", config=types)
    yield "e3-types-short", Kind(draft="e3", config={"layer_types": ["full_attention"] * 2})
    yield "lm-layers", Kind(draft="lm", config={"num_hidden_layers": 4})
    yield (
        "e3-two-layers-36",
        Kind(draft="e3", arguments={"num_layers": 2}, config={"num_hidden_layers": 36}),
    )


def layer_kinds() -> Iterator[tuple[str, Kind]]:
    """Other numbers of captured layers, each said in several places; widths; nulls."""
    q3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    for count in (2, 4, 5):
        after = {2: [1, 4], 4: [1, 2, 3, 4], 5: [0, 1, 2, 3, 4]}[count]
        top, nested = {_IDS: [i + 1 for i in after]}, {"eagle_config": {_IDS: after}}
        no_section, wide = {"eagle_config": None}, {"fc.weight": _tensor(_HIDDEN, count * _HIDDEN)}
        fc = _with(**wide)
        for draft in ("e3", "mla"):
            for name, config in (
                ("none", no_section),
                ("both", top | nested),
                ("3-said", top | nested | {"num_aux_hidden_states": 3}),
            ):
                if draft == "e3" or name == "none" or (name == "3-said" and count < 5):
                    yield (
                        f"{draft}-{count}-layers-{name}",
                        Kind(draft=draft, config=config, edit=fc),
                    )
        yield f"e3-{count}-layers-top", Kind(draft="e3", config=top | no_section, edit=fc)
        norms = {f"midlayer.self_attn.{n}_norm.weight": _tensor(64) for n in "qk"}
        of_heads = Kind(draft="e3", config=q3 | top | no_section, edit=_with(**wide, **norms))
        yield f"e3-{count}-layers-qwen3", of_heads
        for name, layers in (("", {}), ("-said", {"num_aux_hidden_states": count})):
            yield (
                f"e3-{count}-speculators{name}",
                Kind(draft="e3", config=_speculators(top, layers), edit=fc),
            )
    for draft in ("e3", "mla", "dflash", "dspark"):
        for width in ("said", "unsaid"):
            count = 3 if draft in ("e3", "mla") else 2
            fc = _with(**{"fc.weight": _tensor(_HIDDEN, count * 2 * _HIDDEN)})
            config = {"target_hidden_size": 2 * _HIDDEN} if width == "said" else {}
            yield f"{draft}-width-{width}", Kind(draft=draft, config=config, edit=fc)
    for draft in ("e3", "mla", "dflash"):
        for key in ("target_hidden_size", "attention_bias", "max_position_embeddings", "auto_map",
                    "text_config", "eagle_config", "dflash_config", "head_dim", "rope_scaling",
                    "sliding_window", "quantization_config"):  # fmt: skip
            if (draft, key) != ("dflash", "dflash_config"):  # bad input
                yield f"{draft}-null-{key.replace('_', '-')}", Kind(draft=draft, nulls=(key,))
    for key in ("max_position_embeddings", "num_key_value_heads"):
        config = _speculators({_IDS: [2, 4, 5]}, {key: None})
        yield f"e3-speculators-null-{key.replace('_', '-')}", Kind(draft="e3", config=config)


_IDS = "eagle_aux_hidden_state_layer_ids"


def _speculators(own: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the e3 draft as the speculators package saves one."""
    plain = {"model_type": None, "eagle_config": None, "architectures": ["Eagle3Speculator"]}
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    of_layers = {
        "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "num_hidden_layers": 1, "hidden_size": _HIDDEN,
        "vocab_size": _VOCAB, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    return {
        **plain,
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "verifier": {"architectures": [], "name_or_path": "owner/target"},
        },
        "transformer_layer_config": of_layers | dict(layers),
        **own,
    }


def gptq_kinds() -> Iterator[tuple[str, Kind]]:
    """GPTQ and AutoRound."""
    for draft in ("lm", "qwen2", "qwen3", "e3", "dflash", "mla"):
        yield f"{draft}-gptq", _gptq(draft)
        yield f"{draft}-gptq-no-idx", _gptq(draft, stored=formats.gptq(g_idx=False))
        yield f"{draft}-gptq-bf16", _gptq(draft, stored=formats.gptq(scales="BF16"))
    for draft in ("lm", "e3"):
        yield f"{draft}-gptq-dynamic", _gptq(draft, declared={"dynamic": formats.KEPT_FC})
        yield f"{draft}-gptq-asym", _gptq(draft, declared={"sym": False})
        yield f"{draft}-gptq-act", _gptq(draft, declared={"desc_act": True})
        yield (
            f"{draft}-gptq-32",
            _gptq(draft, declared={"group_size": 32}, stored=formats.gptq(size=32)),
        )
        yield (
            f"{draft}-gptq-64",
            _gptq(draft, declared={"group_size": 64}, stored=formats.gptq(size=64)),
        )
        yield (
            f"{draft}-gptq-channel",
            _gptq(draft, declared={"group_size": -1}, stored=formats.gptq(size=-1)),
        )
        yield f"{draft}-gptq-8", _gptq(draft, declared={"bits": 8}, stored=formats.gptq(bits=8))
        yield f"{draft}-gptq-3", _gptq(draft, declared={"bits": 3}, stored=formats.gptq(bits=3))
        yield f"{draft}-gptq-v2", _gptq(draft, declared={"checkpoint_format": "gptq_v2"})
        names = [[f"self_attn.{leaf}" for leaf in _ATTENTION], [f"mlp.{leaf}" for leaf in _MLP]]
        yield f"{draft}-gptq-blocks", _gptq(draft, declared={"modules_in_block_to_quantize": names})
        yield (
            f"{draft}-gptq-down-kept",
            _gptq(
                draft,
                declared={"dynamic": {"-:.*down_proj$": {}, **formats.KEPT_FC}},
                kept=("down_proj",),
            ),
        )
        yield f"{draft}-gptq-marlin", _gptq(draft, declared={"quant_method": "gptq_marlin"})
    yield "lm-gptq-fp16", _gptq("lm", config={"torch_dtype": "float16"}, arguments={"dtype": "F16"})
    fc_kept = {"extra_config": {"fc": {"bits": 16}, "model.fc": {"bits": 16}}}
    for draft in ("lm", "qwen2", "qwen3", "e3", "dflash", "mla"):
        yield f"{draft}-ar", _auto_round(draft, **fc_kept)
        yield f"{draft}-ar-bare", _auto_round(draft)
    for draft in ("lm", "e3"):
        blocks = {"block_name_to_quantize": "model.layers"}
        yield f"{draft}-ar-blocks", _auto_round(draft, **blocks)
        yield f"{draft}-ar-asym", _auto_round(draft, sym=False, **fc_kept)
        awq = {"packing_format": "auto_round:auto_awq", **fc_kept}
        yield f"{draft}-ar-awq", _auto_round(draft, stored=formats.awq(), **awq)
        yield f"{draft}-ar-awq-asym", _auto_round(draft, stored=formats.awq(), sym=False, **awq)
        yield (
            f"{draft}-ar-32",
            _auto_round(draft, stored=formats.gptq(size=32, g_idx=False), group_size=32, **fc_kept),
        )
        yield (
            f"{draft}-ar-8",
            _auto_round(draft, stored=formats.gptq(bits=8, g_idx=False), bits=8, **fc_kept),
        )


def _gptq(draft: str, *, declared: Mapping[str, Any] | None = None, **more: Any) -> Kind:
    more.setdefault("stored", formats.gptq())
    return Kind(draft=draft, declared=formats.declared_gptq(**(declared or {})), **more)


def _auto_round(draft: str, *, stored: Any = None, config: Any = None, **declared: Any) -> Kind:
    return Kind(
        draft=draft,
        stored=stored or formats.gptq(g_idx=False),
        declared=formats.declared_auto_round(**declared),
        config=config or {},
    )


def other_kinds() -> Iterator[tuple[str, Kind]]:
    """AWQ, FP8, compressed-tensors, ModelOpt."""
    f, tokens = formats, formats.args("float", 8, "token", dynamic=True)
    channel, static = f.args("float", 8, "channel"), f.args("int", 8, "tensor")
    for draft in ("lm", "e3", "dflash"):
        kept = ("re:.*fc$", "re:.*lm_head$")
        yield f"{draft}-awq", Kind(draft=draft, stored=f.awq(), declared=f.declared_awq())
        marlin = f.declared_awq(quant_method="awq_marlin")
        yield f"{draft}-awq-marlin", Kind(draft=draft, stored=f.awq(), declared=marlin)
        old = {"w_bit": 4, "q_group_size": 128, "bits": None, "group_size": None}
        spelled = {k: v for k, v in (f.declared_awq() | old).items() if v is not None}
        yield f"{draft}-awq-w-bit", Kind(draft=draft, stored=f.awq(), declared=spelled)
        blocks = f.declared_blocks(modules_to_not_convert=["fc", "model.fc", "lm_head"])
        yield f"{draft}-blocks", Kind(draft=draft, stored=f.fp8_blocks(), declared=blocks)
        powers = {**blocks, "scale_fmt": "ue8m0"}
        yield f"{draft}-ue8m0", Kind(draft=draft, stored=f.fp8_blocks(), declared=powers)
        fp8 = f.declared_fp8(ignored_layers=["fc", "model.fc", "lm_head"])
        fp8["modules_to_not_convert"] = fp8["ignored_layers"]
        yield f"{draft}-fp8", Kind(draft=draft, stored=f.fp8, declared=fp8)
        for name, leaf, suffixes in (
            ("kv", "k_proj", _KV),
            ("kv-parts", "k_proj", {"k_proj.k_scale": _SCALE, "v_proj.v_scale": _SCALE}),
            ("kv-attn", "k_proj", {f"attn.{key}": scale for key, scale in _KV.items()}),
            ("kv-old", "k_proj", {"kv_scale": _SCALE}),
        ):
            kv = _beside(leaf, suffixes)
            yield f"{draft}-fp8-{name}", Kind(draft=draft, stored=f.fp8, declared=fp8, edit=kv)
        kv = _beside("k_proj", _KV)
        ct = f.declared_ct(channel, tokens, "float-quantized", ignore=kept)
        yield (
            f"{draft}-ct-fp8-kv-scheme",
            Kind(
                draft=draft,
                stored=f.fp8_tokens,
                declared={**ct, "kv_cache_scheme": f.KV_FP8},
                edit=kv,
            ),
        )
        yield (
            f"{draft}-ct-fp8-kv-only",
            Kind(draft=draft, stored=f.fp8_tokens, declared=ct, edit=kv),
        )
        flat = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*fc*", "lm_head"]}
        flat |= {"exclude_modules": ["*fc*", "lm_head"]}
        yield (
            f"{draft}-modelopt-kv",
            Kind(
                draft=draft,
                stored=f.fp8,
                declared={**flat, "kv_cache_quant_algo": "FP8"},
                edit=_beside("k_proj", {"k_proj.k_scale": _SCALE, "v_proj.v_scale": _SCALE}),
            ),
        )
        fp4 = {**flat, "quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "group_size": 16}
        yield f"{draft}-modelopt-fp4", Kind(draft=draft, stored=f.modelopt_nvfp4, declared=fp4)
        yield (
            f"{draft}-ct-int8-static",
            Kind(
                draft=draft,
                stored=f.int8,
                declared=f.declared_ct(f.args("int", 8, "channel"), static, "int-quantized"),
            ),
        )
        nvfp4 = f.args("float", 4, "tensor_group", group_size=16)
        dynamic = {**nvfp4, "dynamic": "local"}
        ct = f.declared_ct(nvfp4, dynamic, "nvfp4-pack-quantized")
        yield f"{draft}-ct-nvfp4", Kind(draft=draft, stored=f.nvfp4(), declared=ct)
        yield (
            f"{draft}-ct-nvfp4-no-input",
            Kind(draft=draft, stored=f.nvfp4(inputs=False), declared=ct),
        )
        for size in (16, 256):
            weights = f.args("int", 4, "group", group_size=size)
            yield (
                f"{draft}-ct-int4-{size}",
                Kind(
                    draft=draft,
                    stored=f.packed(size=size),
                    declared=f.declared_ct(weights, None, "pack-quantized"),
                ),
            )
    for draft in ("e3", "lm"):
        yield f"{draft}-plain-kv", Kind(draft=draft, edit=_beside("k_proj", _KV))
    names = ["fc", "model.fc", "lm_head"]
    mla = {"ignored_layers": names, "modules_to_not_convert": names}
    yield (
        "mla-blocks-kv",
        Kind(
            draft="mla",
            stored=f.fp8_blocks(),
            kept=("kv_b_proj",),
            declared=f.declared_blocks(**{key: [*names, "kv_b_proj"] for key in mla}),
            edit=_beside("kv_b_proj", _KV),
        ),
    )
    for draft in ("lm-tied", "lm"):
        head = _with(**{"lm_head.weight": _tensor(_VOCAB, _HIDDEN)})
        ct = f.declared_ct(channel, tokens, "float-quantized")
        yield (
            f"{draft}-tied-head-fp8",
            Kind(draft=draft, stored=f.fp8_tokens, declared=ct, config=_TIED, edit=head),
        )
    for draft in ("lm", "e3", "qwen2"):
        ct = f.declared_ct(channel, tokens, "float-quantized")
        yield (
            f"{draft}-fp8-bias",
            Kind(
                draft=draft,
                stored=f.fp8_tokens,
                declared=ct,
                config={"attention_bias": True} if draft != "qwen2" else {},
                edit=_biases(*_ATTENTION) if draft != "qwen2" else (lambda tensors: tensors),
            ),
        )


def kinds() -> dict[str, Kind]:
    """All of them, by name."""
    each = (plain_kinds(), layer_kinds(), gptq_kinds(), other_kinds())
    return {name: kind for kinds in each for name, kind in kinds}


def write(kind: Kind, folder: Path) -> None:
    """Build the draft, quantize it, declare it."""
    build, arguments = DRAFTS[kind.draft]
    build(folder, **(arguments | dict(kind.arguments)))
    rng, tensors = np.random.default_rng(3), {}
    for name, tensor in kind.edit(read_tensors(folder)).items():
        module = name.removesuffix(".weight")
        never = len(tensor.shape) != 2 or any(part in module for part in (*_NEVER, *kind.kept))
        if never or module == name or kind.stored is None or "kernel_projection" in module:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        for suffix, (dtype, shape) in kind.stored(rows, columns).items():
            tensors[f"{module}.{suffix}"] = formats.random_tensor(rng, suffix, dtype, shape)
    write_tensors(folder, tensors, metadata={"format": "pt"})
    declared = {"quantization_config": kind.declared} if kind.declared else {}
    config = folder / "config.json"
    edit_json(config, **kind.config, **declared)
    nulls = dict.fromkeys(kind.nulls)
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | nulls), "utf-8")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("python", nargs="?", type=Path, help="of the engines' environment")
    parser.add_argument("--count", action="store_true", help="hold `check` against kinds.json")
    parser.add_argument("--new", action="store_true", help="only those that it does not hold")
    parser.add_argument("--work", type=Path, help="folder to keep the folders in")
    arguments = parser.parse_args()
    if arguments.count:
        return count(foreign_sample.read_sample(OUT))
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        told: dict[Path, list[dict[str, Any]]] = {}
        known = {row["draft"]: row for row in foreign_sample.read_sample(OUT) if arguments.new}
        for name, kind in kinds().items():
            if name in known:
                continue
            folder = work / name / "draft"
            told[folder] = []
            if not folder.exists():
                folder.parent.mkdir(parents=True)
                write(kind, folder)
                hidden = kind.arguments.get("hidden", _HIDDEN)
                write_target(folder.parent / TARGET_FOLDER, hidden, _VOCAB)
        for engine, arch in PLATFORMS:
            for folder, outcome in zip(
                told, ask(arguments.python, list(told), engine, arch), strict=True
            ):
                told[folder] += [outcome] if outcome["verdict"] != "UNKNOWN" else []
        rows = [foreign_sample.sample_row(folder, outcomes) for folder, outcomes in told.items()]
        for row, folder in zip(rows, told, strict=True):
            row["draft"] = folder.parent.name
    rows = [*known.values(), *rows]
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    OUT.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return count(rows)


def ask(python: Path, folders: list[Path], engine: str, arch: str) -> list[dict[str, Any]]:
    """What a loader says of each folder, as if there was such a GPU."""
    script = HERE / f"{engine}_loader.py"
    command = [str(python), str(script), "--arch", arch, "--tp", "1", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"{engine} {arch}: {len(said)} of {len(folders)}", file=sys.stderr)
    if len(said) != len(folders):
        raise RuntimeError(f"{engine} on {arch} did not answer:\n{done.stderr[-4000:]}")
    return said


def count(rows: Sequence[Mapping[str, Any]]) -> int:
    """Print each answer of `check` that is not the engine's, and how many there are of each."""
    found: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as place:
        for row in rows:
            try:
                for asked, verdict, said in foreign_sample.predictions(row, Path(place)):
                    kind = "right" if said.verdict == verdict else f"wrong {said.verdict}"
                    kind = "UNKNOWN" if said.verdict == "UNKNOWN" else kind
                    found[asked.split()[1], kind] += 1
                    if kind != "right":
                        print(f"{asked}: {said.verdict}, not {verdict}: {said.error}")
            except DraftQuantError as exc:
                questions = [each for told in row["answers"].values() for each in told]
                found.update((asked.split()[0], "exit 2") for asked in questions)
                print(f"{row['draft']}: exit 2: {exc.what}")
    for (engine, kind), number in sorted(found.items()):
        print(f"{engine}: {number} {kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
