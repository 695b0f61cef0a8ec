"""Keys of config.json: what each reading takes and refuses, whole, and which family has a name."""

import sys
from contextlib import nullcontext
from typing import Any

import pytest
from draftquant.quantize.drafts import FAMILIES
from draftquant.quantize.drafts.config_reader import (
    ConfigReader,
    layers_in_both_places,
    misspelling_of,
    near_key,
    object_at,
    reads_aux_layers,
    with_text_config,
)
from draftquant.recipes.errors import CheckpointError

MOST = sys.float_info.max
WHOLE, NUMBER, FLAG = "a positive whole number", "a positive number", "true or false"
IDS = "distinct layer numbers in ascending order"
READ: list[tuple[str, Any, Any]] = [
    *(("positive", value, value) for value in (1, 2**70)),
    *(("positive", value, WHOLE) for value in (0, -1, 1.0, True, "1", [1])),
    *(("number", value, float(value)) for value in (1, 0.5, MOST)),
    *(("number", value, NUMBER) for value in (0, -0.5, 2 * MOST, float("nan"), True, "1")),
    *(("flag", value, value) for value in (True, False)),
    *(("flag", value, FLAG) for value in (0, 1, "true", [])),
    *(("layer_ids", value, tuple(value)) for value in ([0], [0, 1], [2, 30, 57])),
    ("layer_ids", None, None),
    *(("layer_ids", value, IDS) for value in ([], [1, 1], [2, 1], [-1], [1.0], [True], "12", {})),
    *(("even", value, value) for value in (2, 64)),
    ("even", 63, "an even number"),
    ("after_layer", [1, 3], [0, 2]),
    ("after_layer", None, None),
    ("after_layer", [0, 2], "ids from 1 (the output of layer 0)"),
]


@pytest.mark.parametrize(("reading", "value", "expected"), READ)
def test_a_value(reading: str, value: Any, expected: Any) -> None:
    keys = ConfigReader({"key": value}, "config.json")
    if not isinstance(expected, str):
        assert getattr(keys, reading)("key") == expected
        return
    with pytest.raises(CheckpointError) as caught:
        getattr(keys, reading)("key")
    assert caught.value.where == "config.json"
    assert caught.value.what.startswith(f"key: expected {expected}, got ")


@pytest.mark.parametrize("none", [{}, {"hidden_size": None}])
@pytest.mark.parametrize(("reading", "default"), [("positive", 3), ("number", 2), ("flag", False)])
def test_a_missing_key(none: dict[str, None], reading: str, default: object) -> None:
    keys = ConfigReader(none, "c")
    assert getattr(keys, reading)("hidden_size", default) == default
    with pytest.raises(CheckpointError, match="c: hidden_size: missing key"):
        getattr(keys, reading)("hidden_size")


def test_sections_and_what_is_given() -> None:
    keys = ConfigReader({"a": {"b": 2, "c": None}, "d": []}, "c")
    assert (keys.section("a").positive("b"), keys.section("none").config) == (2, {})
    assert keys.section("a").positives("b", "c", "none") == {"b": 2}
    with pytest.raises(CheckpointError, match="d: expected an object, got"):
        keys.section("d")
    with pytest.raises(CheckpointError, match="c: a: b: expected"):
        keys.section("a").flag("b")
    assert object_at({"a": {"b": 1}}, "a") == {"b": 1}
    assert object_at({"a": [1]}, "a") == object_at({}, "a") == {}
    nested = {"text_config": {"x": 1, "y": 1}, "y": 2}
    assert with_text_config(nested) == {"x": 1, "y": 2, "text_config": {"x": 1, "y": 1}}


@pytest.mark.parametrize(
    ("got", "expected", "refused"),
    [
        ("silu", "silu", False),
        (None, "silu", False),
        ("gelu", "silu", True),
        (1, 1.0, False),
        (True, 1, True),
        (0, False, True),
        (False, False, False),
    ],
)
def test_other_maths(got: object, expected: object, refused: bool) -> None:
    served = {"other": (1, ""), "key": (expected, "other maths")}
    with pytest.raises(CheckpointError) if refused else nullcontext():
        ConfigReader({"key": got}, "c").refuse_others(served)


def test_misspelt_keys_are_those_that_nobody_knows() -> None:
    assert misspelling_of("hidden_size", {"hiden_size": 1}) == "hiden_size"
    assert misspelling_of("num_attention_heads", {"num_attention_head": 1}) == "num_attention_head"
    assert misspelling_of("vocab_size", {"draft_vocab_size": 1, "vocabulary": 1}) is None
    assert misspelling_of("rope_scaling", {"rope_scalings": 1, "rope_theta": 1}) == "rope_scalings"
    assert misspelling_of("num_key_value_heads", {"num_attention_heads": 8}) is None
    assert near_key("hiden_size", {"hiden_size": 1}) == "hidden_size"
    assert near_key("hiden_size", {"hiden_size": 1, "hidden_size": 1}) is None
    assert near_key("hidden_size", {}) is None


@pytest.mark.parametrize(
    ("model_type", "after", "nested"),
    [
        ("llama", (1, 2), [1, 2]),
        ("deepseek_v3", (1, 2), [1, 2]),
        ("deepseek_v3", (2, 5), [3, 6]),
        ("kimi_k2", (2, 5), [3, 6]),
    ],
)
def test_layers_for_both_places(model_type: str, after: tuple[int, ...], nested: list[int]) -> None:
    both = layers_in_both_places(after, {"model_type": model_type})
    assert both == ([i + 1 for i in after], nested)


def test_aux_layers_are_read_unless_a_draft_says_otherwise() -> None:
    assert reads_aux_layers({}, "c")
    for used in (True, False):
        assert reads_aux_layers({"eagle_config": {"use_aux_hidden_state": used}}, "c") is used


def test_a_language_model_has_these_names_and_no_fewer_or_others() -> None:
    (family,) = (each for each in FAMILIES if each.name == "language-model")
    needed = {"norm.weight", "layers.0.input_layernorm.weight", "layers.0.mlp.up_proj.weight"}
    assert family.recognises({*needed, "embed_tokens.weight"})
    assert not any(family.recognises(needed - {name}) for name in needed)
    for more in ("fc.weight", "layers.0.hidden_norm.weight"):
        assert not family.recognises({*needed, more})
