"""Rope scalings in replay, against both engines' own modules and against transformers.

Tolerance: engines compute angles in float32. At position 500 an angle is at most 500, with an error
of 500 * 2^-24 = 3e-5 from its rounding and as much from that of the frequency; values of up to 1.5
turn by that, and are recorded to 6 digits: 1e-4 bounds it. A pair that is scaled wrongly turns by
another angle altogether: more than 0.01 in some pair.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from by_recipe import draft_of
from draftquant.quantize.drafts.maths import rotate
from draftquant.quantize.drafts.rope import RopeConfig, Unreplayed, read_rope, rope_frequencies
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import CheckpointError
from tiny_mla import tiny_eagle3_mla

sys.path.append(
    str(Path(__file__).resolve().parents[1] / "experiments" / "engines")
)  # its modules stand alone

from ropes import CASES, OUT, POSITIONS, THETA, head

TOLERANCE = 1e-4
DISPUTED = "dynamic-factor"
RECORDED: dict[str, list[list[float]]] = json.loads(OUT.read_text(encoding="utf-8"))


def read(scaling: dict[str, Any] | None, **keys: Any) -> RopeConfig:
    return read_rope({"rope_theta": THETA, "rope_scaling": scaling, **keys}, "config.json")


def turned(rope: RopeConfig) -> torch.Tensor:
    queries = torch.tensor(head(), dtype=torch.float64)[None, None]
    return rotate(queries, torch.tensor(POSITIONS), rope)[0, 0]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_replay_rotates_as_the_engine_does(engine: str) -> None:
    for name in CASES.keys() - {DISPUTED}:
        expected = torch.tensor(RECORDED[f"{engine} {name}"], dtype=torch.float64)
        assert (turned(read(CASES[name])) - expected).abs().max() < TOLERANCE, name


def test_what_is_not_replayed_says_why() -> None:
    ntk = {"type": "ntk", "factor": 2.0}
    mrope = {**CASES["yarn"], "mrope_section": [4, 2, 2]}
    for section, what in (
        ({"rope_type": "longrope"}, "'longrope'"), ({"type": "su"}, "'su'"), (ntk, "'ntk'"),
        ({"type": 7}, "7"), (mrope, "'yarn' with mrope_section"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError) as caught:
            rope_frequencies(read(section), 16)
        assert f"does not compute rope type {what}, of which" in caught.value.what
        assert caught.value.where == "config.json: rope_scaling"
        assert "measure this draft on a server" in caught.value.fix
    part = read(None, partial_rotary_factor=0.75).scaling
    assert isinstance(part, Unreplayed)
    assert part.what.startswith("a part of each head is rotated")
    assert read(None, partial_rotary_factor=1.0).scaling is None


def test_latent_attention_is_served_with_yarn_whatever_the_type(tmp_path: Path) -> None:
    folder = tiny_eagle3_mla(tmp_path / "draft", config={"rope_scaling": CASES["llama3"]})
    assert draft_of(folder).rows
    with pytest.raises(CheckpointError, match="expected 'default' or 'yarn': engines take any"):
        load_draft(folder)
