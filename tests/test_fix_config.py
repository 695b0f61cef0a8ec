"""Lints on the command line; `--fix-config`: what it writes, records, and what verify accepts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from by_recipe import draft_of
from draftquant.quantize.drafts.config_defaults import as_read, class_defaults
from draftquant.quantize.drafts.config_reader import KEY
from draftquant.quantize.drafts.rope import Unreplayed
from draftquant.quantize.lints.catalogue import find_lints
from draftquant.quantize.verify import verify
from draftquant.scripts.cli import main
from draftquant.scripts.dev.config_defaults import OUT, text_of
from tiny import config_of, edit_json, tiny_eagle3_llama
from verify_cases import reseal

ALL = {KEY: [2, 4, 5], "draft_vocab_size": 96}
RECIPE = ("--recipe", "int4-channel", "--backend", "torch")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """Two lints that can be fixed, one note."""
    return tiny_eagle3_llama(tmp_path / "draft", config={"draft_vocab_size": None})


def quantize(draft: Path, out: Path, *options: str) -> dict[str, Any]:
    """Run the command and return the config.json that it wrote."""
    assert main(["quantize", str(draft), *RECIPE, "--out", str(out), *options]) == 0
    return dict(config_of(out))


def faults(out: Path, draft: Path, *, foreign: bool = False) -> list[tuple[str, str, str]]:
    found = verify(out, draft, foreign=foreign).faults
    return [(f.where.removeprefix(f"{out}/"), f.expected, f.got) for f in found]


def test_the_flag_fixes_the_output_only_and_says_so(draft: Path, tmp_path: Path) -> None:
    before = (draft / "config.json").read_bytes()
    written = quantize(draft, tmp_path / "out", "--fix-config", "--json")
    del written["quantization_config"]
    assert written == json.loads(before) | ALL
    assert (draft / "config.json").read_bytes() == before
    provenance = json.loads((tmp_path / "out" / "draftquant.json").read_text(encoding="utf-8"))
    assert provenance["config_changes"] == ALL
    assert verify(tmp_path / "out", draft).faults == ()
    assert main(["verify", str(tmp_path / "out"), "--against", str(draft)]) == 0


def test_a_lint_that_only_a_replay_settles_stays_and_says_why(tmp_path: Path) -> None:
    trained = {"rope_theta": 50000.0, "_torchspec_version": "0.1"}
    draft = tiny_eagle3_llama(tmp_path / "draft", config=trained)
    assert quantize(draft, tmp_path / "out", "--fix-config")["rope_theta"] == 50000.0


BREAKS: dict[str, tuple[Callable[[dict[str, Any]], Any], Any, list[tuple[str, str, str]]]] = {
    "a value of another type": (
        lambda c: c.update(draft_vocab_size=96.0), ALL,
        [("config.json: draft_vocab_size", "96", "96.0")],
    ),
    "a change that no lint asks for": (
        lambda c: c.update(rope_theta=50000.0), ALL,
        [("config.json: rope_theta", "10000.0", "50000.0")],
    ),
    "recorded, not made": (
        lambda c: c.pop(KEY), ALL, [(f"config.json: {KEY}", "[2, 4, 5]", "no such key")],
    ),
    "another one recorded": (
        dict, {"torch_dtype": "float16"},
        [("config.json: draft_vocab_size", "null", "96"),
         (f"config.json: {KEY}", "no such key", "[2, 4, 5]"),
         ("config.json: torch_dtype", '"float16"', '"bfloat16"')],
    ),
    "made and recorded, of what the draft computes": (
        lambda c: c.update(rms_norm_eps=0.5), ALL | {"rms_norm_eps": 0.5},
        [("config.json: rms_norm_eps", "no change of what the draft computes", "0.5")],
    ),
    "something else recorded": (
        dict, [7],
        [("draftquant.json", "readable headers and declaration",
          "config_changes: expected an object, got a list")],
    ),
}  # fmt: skip


def test_verify_accepts_these_changes_and_no_others(draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    right = json.dumps(quantize(draft, out, "--fix-config"))
    for name, (change, recorded, expected) in BREAKS.items():
        config = json.loads(right)
        change(config)
        (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
        edit_json(out / "draftquant.json", config_changes=recorded)
        reseal(out)
        assert faults(out, draft) == expected, name
    (out / "draftquant.json").unlink()  # a folder without provenance may be fixed too
    (out / "config.json").write_text(right, encoding="utf-8")
    assert faults(out, draft, foreign=True) == []
    edit_json(out / "config.json", rope_theta=50000.0)
    assert faults(out, draft, foreign=True) == [("config.json: rope_theta", "10000.0", "50000.0")]


# ---- keys that config.json lacks: what the class of its model_type fills in

ROWS: dict[str, dict[str, Any]] = json.loads(OUT.read_text(encoding="utf-8"))
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def oss(to: Path, **config: Any) -> Path:
    """A Llama draft under gpt_oss, without the keys that this class fills in."""
    draft = tiny_eagle3_llama(to, config={"model_type": "gpt_oss", **config})
    keys = config_of(draft)
    del keys["rope_theta"]
    (draft / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    return draft


def test_the_rows_are_those_of_the_pinned_transformers() -> None:
    pins = (OUT.parents[2] / "constraints.txt").read_text(encoding="utf-8")
    assert f"transformers=={ROWS['transformers']['transformers']}\n" in pins
    assert transformers.__version__ == ROWS["transformers"]["transformers"]
    assert {name: found["transformers"] for name, found in ROWS.items()} == {
        "transformers": "5.23.0", "vllm": "5.20.2", "sglang": "5.19.0",
    }  # fmt: skip


def test_a_row_stands_once_with_all_its_types() -> None:
    types = {
        place: {name: row for names, row in found["rows"] for name in names}
        for place, found in ROWS.items()
    }
    here, *engines = (
        {"transformers": ROWS[place]["transformers"], "types": types["transformers"] | of_place}
        for place, of_place in types.items()
    )
    for said in engines:
        said["types"] = {name: row for name, row in said["types"].items() if row is not False}
    written = text_of(here, dict(zip(("vllm", "sglang"), engines, strict=True)))
    assert written == OUT.read_text(encoding="utf-8")


def test_absent_keys_are_the_class_s_and_given_ones_stay() -> None:
    config = {"model_type": "gpt_oss", "num_hidden_layers": 3, "head_dim": 32}
    assert as_read(config) == {
        **config, "sliding_window": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 150000.0, "rope_parameters": YARN,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert "rope_parameters" not in as_read({**config, **linear})
    assert as_read({**config, "rope_scaling": None})["rope_parameters"] == YARN
    assert as_read({**config, "rope_parameters": None})["rope_parameters"] is None
    inner = as_read({"model_type": "x", "text_config": {"model_type": "mixtral"}})["text_config"]
    assert inner["rope_theta"] == 1000000.0


def test_what_is_not_known_is_told_apart() -> None:
    assert [*map(class_defaults, ("no_such_type", None, "vit"))] == ["unknown"] * 3
    assert class_defaults("falcon") == "refused"
    assert class_defaults("internlm3") != "unknown"
    assert class_defaults("internlm3", "vllm") == class_defaults("internlm3", "sglang") == "unknown"
    assert class_defaults("kimi_k2") == class_defaults("deepseek_v3", "sglang")


def test_geometry_replay_and_lints_take_the_class(tmp_path: Path) -> None:
    draft = oss(tmp_path / "draft", layer_types=["full_attention"])
    rope: Any = draft_of(draft).geometry.rope
    assert (rope.theta, rope.yarn.factor, rope.yarn.truncate) == (150000.0, 32.0, False)
    (cause,) = (x.cause for x in find_lints(draft_of(draft)) if x.name == "rope-theta-missing")
    assert "then use base 150000, which model_type gpt_oss fills in" in cause
    glm = tiny_eagle3_llama(tmp_path / "glm", config={"model_type": "glm4"})
    part: Any = draft_of(glm).geometry.rope
    assert isinstance(part.scaling, Unreplayed)
