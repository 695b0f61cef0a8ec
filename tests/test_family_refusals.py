"""What no family reads: faults of config.json and of tensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny_mtp
from asked_pairs import check_draft
from by_recipe import draft_of
from draftquant.quantize.engines.contract import ENGINE_NAMES
from draftquant.recipes.errors import CheckpointError
from tiny import Stored, change, edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark, tiny_dspark_mla
from tiny_llama import tiny_language_model, with_mask_hidden
from tiny_mla import tiny_eagle3_mla
from tiny_speculators import BUILD

LANGUAGE_MODELS = ("Llama", "Qwen2", "Qwen3")
BUILDERS: Mapping[str, Callable[[Path], Path]] = {
    "llama": tiny_eagle3_llama,
    "two": partial(tiny_eagle3_llama, num_layers=2),
    "pruned": partial(tiny_eagle3_llama, pruned_vocabulary=True),
    "mla": tiny_eagle3_mla,
    "mla-two": partial(tiny_eagle3_mla, num_layers=2),
    "mla-pruned": partial(tiny_eagle3_mla, modelopt=True, pruned_vocabulary=True),
    "peagle": lambda folder: with_mask_hidden(tiny_eagle3_llama(folder, prefix="layers.0.")),
    "dflash": partial(tiny_dflash, num_layers=2),
    "dflash-pruned": partial(tiny_dflash, num_layers=1, pruned_vocabulary=True),
    "dflash2": partial(tiny_dflash, kind="dflash2", num_layers=1),
    "dspark": partial(tiny_dspark, num_layers=1),
    "dspark-mla": tiny_dspark_mla,
    "mimo": tiny_mtp.tiny_mimo_mtp,
    "deepseek": tiny_mtp.tiny_deepseek_mtp,
    "glm": tiny_mtp.tiny_glm4_moe_mtp,
    "qwen3-next": tiny_mtp.tiny_qwen3_next_mtp,
    "qwen3.5": partial(tiny_mtp.tiny_qwen3_next_mtp, experts=0),
    "step": tiny_mtp.tiny_step3p5_mtp,
    **{f"{kind} model": partial(tiny_language_model, kind=kind) for kind in LANGUAGE_MODELS},
    **{f"speculators-{name}": build for name, build in BUILD.items()},
}
CONFIGS: Mapping[str, Sequence[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("family_refusals.json").read_text(encoding="utf-8")
)
"""Keys that no draft of its kind has so: dotted ones in their sections, null one that is absent."""
Q, LATENT = "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.{}.weight"
TENSORS: Mapping[str, Sequence[tuple[str, tuple[int, ...] | None]]] = {
    "llama": (
        (Q, (64, 64)), ("lm_head.weight", (95, 64)), ("midlayer.mlp.up_proj.weight", None),
        ("midlayer.self_attn.q_porj.weight", (64,)), ("", (64,)),
        ("layers.0.self_attn.q_proj.weight", (64, 128)),
    ),
    "pruned": (("d2t", None),),
    "peagle": (("mask_hidden", (1, 1, 64)),),
    "mla": (
        (LATENT.format("q_b_proj"), (128, 48)), (LATENT.format("kv_b_proj"), (160, 136)),
    ),
    "mla-two": (("layers.1.self_attn.kv_a_proj_with_mqa.weight", (152, 8)),),
    "dflash": (
        ("layers.1.self_attn.k_proj.weight", (128, 64)), ("layers.0.self_attn.q_proj.bias", (128,)),
    ),
    "dflash-pruned": (("lm_head.weight", None),),
}  # fmt: skip


def refused(folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        draft_of(folder)
    assert caught.value.where.startswith(str(folder))


def without_maths(folder: Path, notice: str) -> None:
    family = draft_of(folder).family
    assert family.name == "unknown"
    assert notice in str(family.notice)


def edit(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change keys of config.json, dotted ones in their sections; None takes one out."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        keys = config.setdefault(section, {}) if section else config
        keys[key] = value
        if value is None:
            del keys[key]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def bf16(shape: tuple[int, ...]) -> Stored:
    return Stored("BF16", shape, bytes(2 * prod(shape)))


@pytest.mark.parametrize("build", CONFIGS)
def test_a_config_that_is_none_of_its_family(build: str, tmp_path: Path) -> None:
    folder = BUILDERS[build](tmp_path / "draft")
    before = (folder / "config.json").read_bytes()
    for changes in CONFIGS[build]:
        edit(folder, changes)
        refused(folder)
        (folder / "config.json").write_bytes(before)


@pytest.mark.parametrize("build", TENSORS)
def test_tensors_that_are_none_of_their_config(build: str, tmp_path: Path) -> None:
    folder = BUILDERS[build](tmp_path / "draft")
    before = read_tensors(folder)
    for name, shape in TENSORS[build]:
        change(folder, **{name: None if shape is None else bf16(shape)})
        refused(folder)
        write_tensors(folder, before)


SEVERAL: Mapping[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "peagle": ({"mask_token_id": 3, "pard_token": 5, "ptd_token_id": 7},
               lambda geometry: geometry.mask_token_id),
    "dflash": ({"is_causal": True, "dflash_config.causal": False},
               lambda geometry: geometry.causal),
}  # fmt: skip
"""Keys that say one thing, in the order in which engines look for them, and what is read."""


@pytest.mark.parametrize("build", SEVERAL)
def test_of_keys_that_say_one_thing_the_first_counts(build: str, tmp_path: Path) -> None:
    folder = BUILDERS[build](tmp_path / "draft")
    keys, read = SEVERAL[build]
    edit(folder, keys)
    for key, value in keys.items():
        assert read(draft_of(folder).geometry) == value, key
        edit(folder, {key: None})


LLAMA, EAGLE3, DFLASH = "LlamaForCausalLM", "LlamaForCausalLMEagle3", "DFlashDraftModel"
EARLIER: Mapping[str, Sequence[tuple[dict[str, Any], str]]] = {
    "Medusa": (
        ({"architectures": ["MedusaModel"]}, "x"),
        ({"architectures": None, "medusa_num_heads": 2}, "0.0.linear.weight"),
    ),
    "EAGLE-1": (
        ({"architectures": ["EagleLlamaForCausalLM"]}, "x"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "x"),
        ({"architectures": [LLAMA]}, "model.fc.weight"),
        ({"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"}, "x"),
    ),
    "Domino": (
        ({"architectures": ["DominoDraftModel"]}, "x"),
        ({"architectures": [DFLASH], "dflash_config": {"projector_type": "domino"}}, "x"),
        ({"architectures": [DFLASH]}, "prefix_gru.weight_ih_l0"),
    ),
}


@pytest.mark.parametrize("kind", EARLIER)
def test_a_draft_that_no_family_reads_is_told_what_it_is(kind: str, tmp_path: Path) -> None:
    for i, (keys, tensor) in enumerate(EARLIER[kind]):
        folder = tiny_eagle3_llama(tmp_path / str(i))
        edit_json(folder / "config.json", **keys)
        write_tensors(folder, {tensor: bf16((1,))})
        without_maths(folder, f"no maths of this draft ({kind})")
        for engine in ENGINE_NAMES:
            assert check_draft(folder, engine=engine).verdict != "LOADS"


OTHERS: tuple[tuple[str, str, str], ...] = (
    ("DFlash3DraftModel", "x", "DFlash with layers of another kind"),
    ("UnheardForCausalLM", "markov_head.markov_w1.weight", "DSpark"),
    ("UnheardForCausalLM", "model.layers.61.eh_proj.weight", "an MTP layer"),
    ("UnheardForCausalLM", "x", "of architecture 'UnheardForCausalLM'"),
    (LLAMA, "candidate_selector.prev_embedding.weight", "DFlash2"),
    (EAGLE3, "midlayer.self_attn.kv_b_proj.weight", "eagle3-llama with latent attention (MLA)"),
    (EAGLE3, "enorm.weight", "EAGLE-3 with TensorRT-LLM's eh_proj"),
)


def test_what_no_family_reads_is_told_what_it_is(tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft")
    for architecture, tensor, kind in OTHERS:
        edit_json(folder / "config.json", architectures=[architecture])
        write_tensors(folder, {tensor: bf16((1,))})
        without_maths(folder, f"no maths of this draft ({kind})")
    edit_json(folder / "config.json", architectures=["UnheardForCausalLM"])
    write_tensors(folder, {"model.layers.3.mlp.up_proj.weight": bf16((1,))})
    refused(folder)
    names = ("model.layers.3.eh_proj.weight", "model.layers.0.mlp.up_proj.weight")
    write_tensors(folder, dict.fromkeys(names, bf16((1,))))
    refused(folder)
