"""The config.json of DFlash drafts: which keys go first, and faults."""

from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.shared.block_layers import DFlashGeometry
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.recipes.errors import CheckpointError
from tiny import edit_json
from tiny_dflash import MASK_TOKEN_ID, tiny_dflash

OWN = {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [1, 3, 5]}


def geometry(folder: Path) -> DFlashGeometry:
    found = read_draft(Checkpoint.open(folder)).geometry
    assert isinstance(found, DFlashGeometry)
    return found


def refused(folder: Path, what: str, fix: str = "") -> None:
    with pytest.raises(CheckpointError) as caught:
        read_draft(Checkpoint.open(folder))
    assert caught.value.where.startswith(str(folder))
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.fix


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_dflash(tmp_path / "draft", num_layers=2)


# What is read


def test_keys_of_dflash_config_go_before_the_top_level(draft: Path) -> None:
    nested = {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 2, 6]}
    edit_json(draft / "config.json", dflash_config=nested, mask_token_id=5, target_layer_ids=[1])
    found = geometry(draft)
    assert (found.block_size, found.mask_token_id, found.aux_layer_ids) == (4, 3, (0, 2, 6))
    edit_json(draft / "config.json", dflash_config={**nested, "block_size": None})
    assert geometry(draft).block_size == 8
    edit_json(draft / "config.json", block_size=None)
    assert geometry(draft).block_size == 16  # as in SGLang


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    folder = tiny_dflash(tmp_path / "draft", heads=2, kv_heads=2, num_layers=1)
    keys = ("head_dim", "num_key_value_heads", "num_target_layers", "layer_types")
    edit_json(folder / "config.json", model_type="llama", **dict.fromkeys(keys))
    found = geometry(folder)
    heads = found.attention
    assert (heads.head_dim, heads.num_key_value_heads, found.layer_types) == (32, 2, None)


@pytest.mark.parametrize(
    ("keys", "causal", "window"),
    [
        ({}, [False, False], None),
        ({"layer_types": None}, [False, False], None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, [False, True], 16),
        ({"dflash_config": {**OWN, "causal": True}}, [True, True], None),
        ({"dflash_config": {**OWN, "causal": True}, "is_causal": False}, [False, False], None),
        (
            {"layer_types": ["sliding_attention"] * 2, "dflash_config": {**OWN, "causal": False}},
            [False, False],
            16,
        ),
        (
            {
                "layer_types": ["sliding_attention"] * 2,
                "dflash_config": {**OWN, "swa_window_size": 8},
            },
            [True, True],
            8,
        ),
    ],
)
def test_causality_and_window(
    keys: dict[str, Any], causal: list[bool], window: int | None, draft: Path
) -> None:
    edit_json(draft / "config.json", sliding_window=16, **keys)
    found = geometry(draft)
    assert [found.is_causal(i) for i in range(2)] == causal
    assert found.sliding_window == window


# Faults


@pytest.mark.parametrize("ids", [[1, 3], [1, 3, 5, 7]])
def test_target_layer_ids_of_another_length_than_fc(ids: list[int], draft: Path) -> None:
    edit_json(draft / "config.json", dflash_config={**OWN, "target_layer_ids": ids})
    refused(
        draft,
        f"fc.weight: expected shape [64, {64 * len(ids)}], got [64, 192] (disagrees with"
        " target_hidden_size x target_layer_ids of config.json)",
        "use the config.json that belongs to these tensors",
    )


REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


@pytest.mark.parametrize("key", [*REQUIRED, "num_attention_heads"])
def test_missing_key(key: str, draft: Path) -> None:
    edit_json(draft / "config.json", **{key: None})
    refused(draft, f"{key}: missing key", f"add '{key}' as the draft was trained with it")


@pytest.mark.parametrize(
    ("own", "what"),
    [
        ({"target_layer_ids": None}, "target_layer_ids: missing key (engines guess"),
        ({"target_layer_ids": [5, 3, 1]}, "target_layer_ids: expected distinct layer numbers in"),
        ({"target_layer_ids": [1, 3, 8]}, "expected ids below num_target_layers = 8, got [1, 3, 8"),
        ({"mask_token_id": 96}, "mask_token_id: expected a token id in [0, 96), got 96"),
        ({"mask_token_id": -1}, "mask_token_id: expected a token id in [0, 96), got -1"),
        ({"mask_token_id": True}, "mask_token_id: expected a token id in [0, 96), got True"),
        ({"block_size": 1}, "block_size: expected at least 2, an anchor and a mask, got 1"),
        ({"block_size": "8"}, "block_size: expected a positive whole number, got '8'"),
        ({"causal": "no"}, "causal: expected true or false, got 'no'"),
    ],
)
def test_wrong_value_in_dflash_config(own: dict[str, Any], what: str, draft: Path) -> None:
    edit_json(draft / "config.json", dflash_config={**OWN, **own})
    refused(draft, what)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"dflash_config": [1]}, "dflash_config: expected an object, got [1]"),
        ({"is_causal": 1}, "is_causal: expected true or false, got 1"),
        ({"layer_types": [FULL]}, "layer_types: expected full_attention or sliding_attention for"),
        ({"layer_types": [FULL, "chunked"]}, "for each of 2 layers, got ['full_attention', 'chunk"),
        ({"layer_types": "full_attention"}, "for each of 2 layers, got 'full_attention'"),
        ({"layer_types": [FULL, []]}, "for each of 2 layers, got ['full_attention', []]"),
        ({"layer_types": [FULL, SLIDING]}, "sliding_window: missing key"),
        ({"layer_types": [FULL, SLIDING], "sliding_window": 0}, "sliding_window: expected a posit"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            "eagle_aux_hidden_state_layer_ids: expected target_layer_ids + 1, got [1, 3, 5] beside"
            " [1, 3, 5]: vLLM would read other layers than SGLang",
        ),
        ({"num_hidden_layers": 10**12, "layer_types": None}, "1000000000000 layers, but 25 tensor"),
    ],
)
def test_wrong_value_at_the_top_level(keys: dict[str, Any], what: str, draft: Path) -> None:
    edit_json(draft / "config.json", **keys)
    refused(draft, what)


def test_ids_of_both_conventions_that_agree(draft: Path) -> None:
    edit_json(draft / "config.json", eagle_aux_hidden_state_layer_ids=[2, 4, 6])
    assert geometry(draft).aux_layer_ids == (1, 3, 5)


@pytest.mark.parametrize(
    ("key", "value", "meaning"),
    [
        ("attention_bias", True, "engines add biases that no quantized layout stores"),
        ("mlp_bias", True, "no engine reads them"),
        ("hidden_act", "gelu", "another activation"),
        ("use_gemma_norm", True, "norms multiply by 1 + weight"),
        ("is_neox_style", False, "interleaved rotary pairs"),
        ("rope_is_neox_style", False, "interleaved rotary pairs"),
        ("partial_rotary_factor", 0.5, "a part of each head is rotated"),
        ("use_swa", True, "only vLLM slides the window over all layers"),
        ("attention_sink_bias", True, "attention sinks"),
        ("add_swa_attention_sink_bias", True, "attention sinks"),
        ("attention_value_scale", 0.7, "scaled values"),
        ("use_aux_hidden_state", False, "a draft without fc"),
        ("sample_from_anchor", True, "the anchor's slot predicts, as in DSpark"),
        ("shift_label", True, "a slot predicts the next position"),
        ("projector_type", "gru", "another way to correct logits"),
        ("conv_kernel_size", 4, "a DFlash2 draft"),
        ("selector_rank", 16, "a DFlash2 draft"),
        ("markov_rank", 16, "a DSpark draft"),
        ("kv_lora_rank", 512, "layers with MLA"),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_other_maths_is_refused(
    key: str, value: Any, meaning: str, nested: bool, draft: Path
) -> None:
    keys = {"dflash_config": {**OWN, key: value}} if nested else {key: value}
    edit_json(draft / "config.json", **keys)
    refused(draft, f"{key}: expected ", "no supported family computes this")
    refused(draft, f", got {value!r}: {meaning}")


@pytest.mark.parametrize("key", ["partial_rotary_factor", "rope_dim"])
def test_partly_rotated_heads_in_a_rope_section_are_refused(key: str, draft: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, key: 0.25}
    edit_json(draft / "config.json", rope_parameters=rope)
    refused(draft, f"{key}: expected ", "no supported family computes this")
