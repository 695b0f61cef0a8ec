"""Targets whose residual stream a quantizer rotated: what says it, and what it does to a draft."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from asked_pairs import check_pair
from draftquant import api as dq
from draftquant.quantize.pairing.inherited import rotated_by
from draftquant.recipes.errors import DraftQuantWarning

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
R1 = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "transform_config": {
        "config_groups": {
            "R1": {
                "type": "hadamard",
                "apply": [
                    {
                        "targets": ["re:.*embed_tokens$", "re:.*o_proj$", "re:.*down_proj$"],
                        "location": "weight_output",
                    },
                    {
                        "targets": ["re:.*q_proj$", "re:.*lm_head$"],
                        "location": "weight_input",
                        "inverse": True,
                    },
                ],
            }
        }
    },
}


def of_transform(targets: list[str], location: str) -> dict[str, Any]:
    applied = [{"targets": targets, "location": location}]
    return {"transform_config": {"config_groups": {"R": {"apply": applied}}}}


def of_quark(**said: Any) -> dict[str, Any]:
    return {"algo_config": [{"name": "gptq"}, {"name": "rotation", **said}]}


@pytest.mark.parametrize(
    ("declared", "is_said"),
    [
        (R1, True),
        (of_transform(["model.embed_tokens"], "weight_output"), True),
        (of_transform(["model.embed_tokens"], "weight_input"), False),
        (of_transform(["Linear"], "weight_output"), False),  # QuIP, whose inverse is at the output
        (of_transform(["re:.*v_proj$"], "weight_output"), False),  # R2
        (of_quark(r1=True, online_r1_rotation=False), True),
        (of_quark(r1=True, online_r1_rotation=True), False),
        (of_quark(r1=False, r2=True), False),
        ({"algo_config": {"name": "quarot"}}, True),
        ({"algo_config": None, "transform_config": None}, False),
        ({"transform_config": {"config_groups": {"R1": {"apply": [None, 3]}}}}, False),
        (None, False),
    ],
)
def test_what_a_declaration_says(declared: dict[str, Any] | None, is_said: bool) -> None:
    assert (rotated_by(declared) is not None) == is_said


def test_check_says_that_acceptance_falls(tmp_path: Path) -> None:
    config = json.loads((PAIR / "target" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": R1}))
    pair = check_pair(PAIR / "draft", tmp_path)
    assert (pair.verdict, pair.exit_code) == ("LOADS BUT WRONG", 1)
    (found,) = [each for each in pair.findings if each.level == "wrong"]
    assert "transform R1 of its transform_config" in found.text
    assert "acceptance falls to almost nothing" in found.text
    assert "the target that it was trained on" in found.remedy


def test_record_warns_of_a_rotated_target(tmp_path: Path) -> None:
    shutil.copytree(PAIR / "target", tmp_path / "target")
    config = json.loads((PAIR / "target" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "target" / "config.json").write_text(
        json.dumps({**config, "quantization_config": of_quark(r1=True)})
    )
    with pytest.warns(DraftQuantWarning, match="residual stream is rotated"):
        dq.record(
            tmp_path / "target",
            PAIR / "prompts.jsonl",
            draft=PAIR / "draft",
            engine="vllm",
            print_server_args=True,
            shared=tmp_path / "shared",
        )
