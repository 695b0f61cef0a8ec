"""The rope: what is read of config.json, and how replay turns by it, against both engines' own
modules and against transformers.

Tolerance of angles: engines compute them in float32. At position 500 an angle is at most 500, with
an error of 500 * 2^-24 = 3e-5 from its rounding and as much from that of the frequency; values of
up to 1.5 turn by that, and are recorded to 6 digits: 1e-4 bounds it. A pair that is scaled wrongly
turns by another angle altogether: more than 0.01 in some pair. Frequencies are recorded to 4
digits.
"""

import json
from collections.abc import Container, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from asked_pairs import check_draft
from by_recipe import draft_of
from draftquant.quantize.drafts.config_defaults import as_read
from draftquant.quantize.drafts.maths import rotate
from draftquant.quantize.drafts.rope import (
    RopeConfig,
    Unreplayed,
    declared,
    followed_by_one,
    read_rope,
    rope_frequencies,
)
from draftquant.quantize.drafts.shared.layers import served_rope
from draftquant.quantize.engines.engine_check import check_checkpoint
from draftquant.quantize.lints.catalogue import find_lints
from draftquant.recipes.errors import CheckpointError
from tiny import config_of, edit_json, tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_llama import tiny_language_model
from tiny_mla import tiny_eagle3_mla

TOLERANCE = 1e-4
ENGINES = Path(__file__).parents[1] / "experiments" / "engines"
RECORDED: dict[str, list[list[float]]] = json.loads((ENGINES / "ropes.json").read_text("utf-8"))
HEAD_DIM, THETA, POSITIONS = 16, 500.0, [0, 1, 7, 100, 500]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2]}
DISPUTED = "dynamic-factor"
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "llama3": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3-step": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic-alpha": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    DISPUTED: {"rope_type": "dynamic", "factor": 4.0},
    "mrope": MROPE,
    "mrope-interleaved": {**MROPE, "mrope_interleaved": True},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
}
"""What was asked of each engine's own rotary embedding, of a query of every position."""


def read(scaling: dict[str, Any] | None, **keys: Any) -> RopeConfig:
    return read_rope({"rope_theta": THETA, "rope_scaling": scaling, **keys}, "config.json")


def turned(rope: RopeConfig) -> torch.Tensor:
    x = [[((7 * i + 3 * j) % 11 - 5) / 4 for j in range(HEAD_DIM)] for i in range(len(POSITIONS))]
    queries = torch.tensor(x, dtype=torch.float64)[None, None]
    return rotate(queries, torch.tensor(POSITIONS), rope)[0, 0]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_replay_rotates_as_the_engine_does(engine: str) -> None:
    for name in sorted(CASES.keys() - {DISPUTED}):
        expected = torch.tensor(RECORDED[f"{engine} {name}"], dtype=torch.float64)
        assert (turned(read(CASES[name])) - expected).abs().max() < TOLERANCE, name


def test_what_is_not_replayed_says_why() -> None:
    ntk = {"type": "ntk", "factor": 2.0}
    mrope = {**CASES["yarn"], "mrope_section": [4, 2, 2]}
    for section in ({"rope_type": "longrope"}, {"type": "su"}, ntk, {"type": 7}, mrope):
        with pytest.raises(CheckpointError):
            rope_frequencies(read(section), 16)
    part = read(None, partial_rotary_factor=0.75).scaling
    assert isinstance(part, Unreplayed)
    assert part.what.startswith("a part of each head is rotated")
    assert read(None, partial_rotary_factor=1.0).scaling is None


def test_latent_attention_is_served_with_yarn_whatever_the_type(tmp_path: Path) -> None:
    folder = tiny_eagle3_mla(tmp_path / "draft", config={"rope_scaling": CASES["llama3"]})
    assert draft_of(folder).rows
    with pytest.raises(CheckpointError, match="expected 'default' or 'yarn': engines take any"):
        rope_frequencies(draft_of(folder).geometry.rope, 16)


def test_latent_attention_takes_its_own_yarn() -> None:
    """DeepSeek's class reads neither key, which other layers turn by."""
    usual = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for more in ({"truncate": False}, {"attention_factor": 3.0}):
        both = [read(scaling) for scaling in (usual, {**usual, **more})]
        assert not torch.equal(*map(turned, both))
        assert torch.equal(*map(turned, map(served_rope, both)))


# ---- What config.json says, as transformers and both engines read it (`rope_readings.json`)

BOTH: Any = ("vllm", "sglang")
READINGS = ENGINES / "rope_readings.json"
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 96, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "num_hidden_layers": 1,
    "max_position_embeddings": 2048, "torch_dtype": "float32",
}  # fmt: skip
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
"""What each config that was asked has beside the keys of its row."""


class Asked(NamedTuple):
    name: str
    case: dict[str, Any]
    read: dict[str, dict[str, Any]]

    @property
    def config(self) -> Mapping[str, Any]:
        keys = {key: value for key, value in self.case.items() if key != "kind"}
        return as_read({**SIZES, **KINDS[self.case["kind"]], **keys})

    @property
    def loads(self) -> bool:
        return not any("refused" in self.read[engine] for engine in BOTH)


@cache
def asked() -> tuple[Asked, ...]:
    def of(row: dict[str, Any]) -> Asked:
        read = {who: said for key, said in row.pop("read").items() for who in key.split()}
        return Asked(row.pop("name"), read=read, case=row)

    return tuple(of(row) for row in json.loads(READINGS.read_text(encoding="utf-8")))


NO_ROW = "134"
"""DFlash with yarn, mrope_section and mscale, for which SGLang's class lacks an argument."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("ropes")
    made = {
        "eagle3": tiny_eagle3_llama(root / "eagle3", embed=False, head_dim=32),
        "dflash": tiny_dflash(root / "dflash", num_layers=1),
        "latent": tiny_eagle3_mla(root / "latent", embed=False, qk_rope_head_dim=32),
        "model": tiny_language_model(root / "model", head_dim=32),
    }
    return {kind: draft_of(folder) for kind, folder in made.items()}


def test_the_base_is_the_one_that_transformers_hands_to_engines() -> None:
    for row in asked():
        found = declared(row.config)
        for reader, said in row.read.items():
            latent = row.case["kind"] == "latent"  # SGLang looks beside the sections by layer
            if "refused" in said or (found.by_layer and (reader == "transformers" or latent)):
                continue
            assert not found.by_layer, (row.name, reader)
            assert found.keys.get("rope_theta", 10000.0) == said["theta"], (row.name, reader)


def reads(rope: RopeConfig, said: dict[str, Any]) -> bool:
    angles, factor = rope_frequencies(rope, 32)
    near = factor == pytest.approx(said["factor"], rel=1e-4)
    return near and angles[::2].tolist() == pytest.approx(said["frequencies"], rel=1e-3)


def test_replay_has_the_frequencies_of_the_engines(folders: dict[str, Any]) -> None:
    """Where they differ and replay computes it all the same, those of vLLM."""
    computed = 0
    for row in asked():
        rope = read_rope(row.config, "config.json")
        if isinstance(rope.scaling, Unreplayed) or row.case["kind"] == "latent":
            continue  # `test_eagle3_forward.py` has the ropes of MLA
        same = not [*followed_by_one(row.config, folders[row.case["kind"]].family.engine_traits)]
        for engine in BOTH if same and not declared(row.config).by_layer else BOTH[:1]:
            if "refused" not in (said := row.read[engine]):
                assert said["rotated"] == 32, row.name
                assert reads(rope, said), row.name
                computed += 1
    assert computed > 300


def test_what_engines_read_differently_is_found_and_nothing_else(folders: dict[str, Any]) -> None:
    """The engine that does not follow a key reads what is declared without it."""
    for row in asked():
        if row.loads:
            traits = folders[row.case["kind"]].family.engine_traits
            found = dict(followed_by_one(row.config, traits))
            assert bool(found) == (row.read["vllm"] != row.read["sglang"]), (row.name, found)
            if len({*found.values()}) != 1 or traits.latent or "original" in str(found):
                continue
            other = "sglang" if "vLLM 0.33" in found.values() else "vllm"
            rope = read_rope(without(row.config, found), "config.json")
            assert isinstance(rope.scaling, Unreplayed) or reads(rope, row.read[other]), row.name


def without(config: Mapping[str, Any], keys: Container[str]) -> Any:
    def kept(read: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in read.items() if key not in keys}

    return json.loads(json.dumps(config), object_hook=kept)


def test_check_refuses_what_an_engine_refuses(folders: dict[str, Any]) -> None:
    """An answer may be UNKNOWN for the class of a model_type, or for its biases."""
    unknown = 0
    for row in asked():
        if row.case["kind"] == "model" or row.name == NO_ROW:
            continue
        draft = folders[row.case["kind"]].checkpoint
        kept = {k: v for k, v in draft.config.items() if not k.startswith(("rope_", "layer_t"))}
        config = {**kept, "max_position_embeddings": 2048, "sliding_window": 64, **row.case}
        for engine in BOTH:
            answer = check_checkpoint(
                replace(draft, config=config), has_side_file=False, engine=engine, arch="sm90"
            )
            unknown += answer.verdict == "UNKNOWN"
            refused = "refused" in row.read[engine]
            expected = ("REFUSED",) if refused else ("LOADS", "LOADS BUT WRONG")
            assert answer.verdict in (*expected, "UNKNOWN"), (row.name, engine, answer.error)
    assert unknown < 320


PLAIN, BARE = {"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "default"}
LAYERS = {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 1e4}}
SPELLED: dict[str, tuple[dict[str, Any], float]] = {
    "nowhere": ({}, 1e4),
    "top": ({"rope_theta": 1e6}, 1e6),
    "parameters": ({"rope_parameters": PLAIN}, 1e6),
    "parameters without it": ({"rope_theta": 1e6, "rope_parameters": BARE}, 1e6),
    "scaling": ({"rope_scaling": PLAIN}, 1e6),
    "scaling and top": ({"rope_scaling": PLAIN, "rope_theta": 1e4}, 1e6),
    "both sections": ({"rope_scaling": PLAIN, "rope_parameters": {"rope_theta": 3e6}}, 1e6),
    "no scaling": ({"rope_scaling": None, "rope_parameters": PLAIN, "rope_theta": 1e4}, 1e6),
    "by layer": ({"rope_parameters": LAYERS}, 1e6),
    "by layer, sliding": (
        {"rope_scaling": LAYERS, "layer_types": ["sliding_attention"], "sliding_window": 64}, 1e4),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_replay_check_lints_and_fix_agree_on_the_base(kind: str, name: str, tmp_path: Path) -> None:
    keys, base = SPELLED[name]
    make = tiny_eagle3_llama if kind == "eagle3" else tiny_dflash
    folder = make(tmp_path / "draft", num_layers=1)
    config = config_of(folder)
    del config["rope_theta"]
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config | keys), encoding="utf-8")
    lints = {lint.name: lint for lint in find_lints(draft_of(folder))}
    by_layer = name.startswith("by layer")
    assert draft_of(folder).geometry.rope.theta == base
    assert ("rope-theta-missing" in lints) == (name == "nowhere")
    assert ("rope-by-layer" in lints) == by_layer
    for engine in BOTH:
        answer = check_draft(folder, engine=engine, arch="sm90", target_layers=8)
        no_window = "sliding" in name and kind == "dflash" and engine == "sglang"
        expected = "REFUSED" if no_window else "UNKNOWN" if by_layer else "LOADS"
        assert answer.verdict == expected
        assert expected != "UNKNOWN" or f'"rope_theta": {base}' in str(answer.remedy)
    if by_layer:
        edit_json(folder / "config.json", **lints["rope-by-layer"].fix)
        assert draft_of(folder).geometry.rope.theta == base
        for engine in BOTH:
            answer = check_draft(folder, engine=engine, arch="sm90", target_layers=8)
            no_window = "sliding" in name and kind == "dflash" and engine == "sglang"
            assert answer.verdict == ("REFUSED" if no_window else "LOADS")


def test_layers_of_several_types_are_not_fixed_nor_replayed(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"]
    keys = {"rope_parameters": LAYERS, "layer_types": types, "sliding_window": 64}
    folder = tiny_dflash(tmp_path / "draft", num_layers=2, config=keys)
    lints = {lint.name: lint for lint in find_lints(draft_of(folder))}
    assert not lints["rope-by-layer"].fix
    assert check_draft(folder, engine="vllm", arch="sm90", target_layers=8).verdict == "UNKNOWN"
    empty = read_rope({"rope_parameters": {kind: {} for kind in LAYERS}}, "config.json")
    for rope in (draft_of(folder).geometry.rope, empty):
        with pytest.raises(CheckpointError, match="have different sections"):
            rope_frequencies(rope, 32)


def test_check_repeats_lints_on_what_is_computed(tmp_path: Path) -> None:
    said = "only vLLM 0.33 follows partial_rotary_factor"
    for key, value in (("partial_rotary_factor", 0.5), ("model_type", "glm4_moe")):
        folder = tiny_eagle3_llama(tmp_path / str(value), config={"hidden_act": "silu", key: value})
        for engine in BOTH:
            answer = check_draft(folder, engine=engine, arch="sm90", target_layers=8)
            assert answer.verdict != "REFUSED"
            assert any(said in note for note in answer.notes)
