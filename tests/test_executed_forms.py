"""LOADS is said of executed forms: drawn folders beside what both engines did with them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import folder_rows
import pytest
from asked_pairs import check_draft, check_pair
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.recipes.errors import CheckpointError
from tiny import change, edit_json, read_tensors, store, tiny_eagle3_llama, values_of

KNOWS_MORE = (
    "does not use it",  # fc, which a loader sees filled
    "puts the target's in its place",  # and its rows are those of other tokens
    "takes the target's head only where",
    "fails when it serves",  # for the layers that it is handed
)
"""Parts of the reasons for which `check` says WRONG of what loads: they show when it serves."""
OTHER_FAULT = {"30 qwen3_5_moe", "287 glm4_moe"}
"""Several things are wrong: `check` and an engine name another one."""
UNKNOWN = {3: 30, None: 216}
"""Of a part and of all; of the drafts' own embeddings beside the target's, and of other forms."""


def answered(rows: Sequence[Any], folder: Path) -> tuple[Counter[str], list[str]]:
    """How many answers are right or UNKNOWN, and those that are neither."""
    counts, wrong = Counter[str](), list[str]()
    for row in rows:
        for asked, told, said in folder_rows.predictions(row, folder):
            more = any(part in (said.error or "") for part in KNOWS_MORE)
            right = said.verdict == told or (told == "LOADS" and more)
            right = right or (row["draft"] in OTHER_FAULT and "LOADS" not in (told, said.verdict))
            counts["right" if right else said.verdict] += 1
            if not right and said.verdict != "UNKNOWN":
                wrong.append(f"{row['draft']} {asked}: {said.verdict} ({said.error}), not {told}")
    return counts, wrong


@pytest.mark.parametrize("start", [3, pytest.param(None, marks=pytest.mark.slow)])
def test_drawn_folders_are_answered_as_the_engines_did(start: int | None, tmp_path: Path) -> None:
    rows = folder_rows.read_rows(folder_rows.DRAWN_FILE)
    counts, wrong = answered(rows if start is None else rows[start::8], tmp_path)
    assert (wrong, counts["UNKNOWN"]) == ([], UNKNOWN[start])


IDS = "eagle_aux_hidden_state_layer_ids"
TOLD = ("check_draft", "check_pair")


@pytest.mark.parametrize(
    "config",
    [{}, {"sample_from_anchor": True}, {"eagle_config": {IDS: [1, 3, 4], "is_causal": True}}],
)
def test_another_key_is_another_form(config: dict[str, Any], tmp_path: Path) -> None:
    draft = tiny_eagle3_llama(tmp_path / "d", config=config)
    answer = check_draft(draft, engine="vllm", arch="sm90")
    assert answer.verdict == ("UNKNOWN" if config else "LOADS")


def test_tensors_of_another_dtype_are_another_form(tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "d")
    change(folder, norm__weight=store(values_of(read_tensors(folder)["norm.weight"]), "F16"))
    answer = check_draft(folder, engine="sglang", arch="sm90")
    assert answer.verdict == "UNKNOWN"
    assert (answer.error or "").endswith("with BF16 and F16 in files")


def inside(name: str) -> dict[str, Any]:
    rows = folder_rows.read_rows(folder_rows.FILES["MTP layers in targets"])
    return dict(next(row for row in rows if row["draft"] == name))


def test_a_pair_has_an_answer_for_each_gpu_where_they_differ(tmp_path: Path) -> None:
    """ModelOpt's FP8, which SGLang has not on ROCm."""
    row = inside("glm modelopt-fp8: quantized")
    folder = folder_rows.write_folder(row, tmp_path / "target")
    asked = check_pair(folder, folder, engine="sglang", subtree=row["subtree"])
    verdicts = {each.answer.arch: each.verdict for each in asked.engines}
    assert verdicts == {"sm90": "LOADS", "sm100": "LOADS", "gfx942": "REFUSED"}
    assert (asked.verdict, asked.exit_code) == ("LOADS", 0)
    assert asked.brief()["SGLang on MI325X (gfx942)"] == "REFUSED"


def test_a_layer_that_is_announced_and_not_stored_is_named(tmp_path: Path) -> None:
    row = inside("wild q35-no-mlp")
    folder = folder_rows.write_folder(row, tmp_path / "some")
    pair = check_pair(folder, folder, engine="vllm", subtree="mtp", arch="sm90")
    assert pair.verdict == "UNKNOWN"
    kept = {name: form for name, form in row["tensors"].items() if not name.startswith("mtp.")}
    none = folder_rows.write_folder({**row, "tensors": kept}, tmp_path / "none")
    with pytest.raises(CheckpointError, match="announces 1 MTP layer"):
        Checkpoint.open(none, subtree="mtp", is_target=True)
    edit_json(none / "config.json", text_config={})
    with pytest.raises(CheckpointError):
        Checkpoint.open(none, subtree="mtp", is_target=True)
