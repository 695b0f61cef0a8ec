"""Two places and two conventions for the target layers that a draft reads."""

from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.config_reader import KEY, SECTION, read_aux_layer_ids
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.recipes.errors import CheckpointError
from tiny import edit_json, tiny_eagle3_llama

Ids = list[int] | None


def config(top: Ids, nested: Ids, model_type: str = "llama") -> dict[str, Any]:
    found: dict[str, Any] = {"model_type": model_type}
    if top is not None:
        found[KEY] = top
    if nested is not None:
        found[SECTION] = {KEY: nested}
    return found


@pytest.mark.parametrize(
    ("top", "nested", "model_type", "after", "spelling"),
    [
        (None, None, "llama", None, "default"),
        (None, [1, 29, 57], "llama", (1, 29, 57), "nested"),
        (None, [0, 1, 2], "llama", (0, 1, 2), "nested"),
        (None, [2, 30, 58], "llama", (2, 30, 58), "nested"),
        (None, [1, 29, 57], "kimi_k2", (1, 29, 57), "nested"),
        (None, [2, 30, 58], "kimi_k2", (1, 29, 57), "nested-inputs"),
        (None, [2, 30, 58], "deepseek_v3", (1, 29, 57), "nested-inputs"),
        (None, [3, 30, 58], "kimi_k2", (3, 30, 58), "nested"),
        ([2, 30, 58], None, "llama", (1, 29, 57), "top"),
        ([1, 2, 3], None, "llama", (0, 1, 2), "top"),
        ([2, 30, 58], [1, 29, 57], "llama", (1, 29, 57), "portable"),
        ([2, 30, 58], [1, 29, 57], "kimi_k2", (1, 29, 57), "portable"),
        ([2, 30, 58], [2, 30, 58], "kimi_k2", (1, 29, 57), "equal"),
        ([2, 30], [2, 30], "llama", (1, 29), "equal"),
    ],
)
def test_what_is_read(
    top: Ids, nested: Ids, model_type: str, after: tuple[int, ...] | None, spelling: str
) -> None:
    found = read_aux_layer_ids(config(top, nested, model_type), "config.json")
    assert (found.after, found.spelling) == (after, spelling)


@pytest.mark.parametrize(
    ("top", "nested", "parts"),
    [
        ([2, 30, 58], [1, 29, 56], ("[2, 30, 58]", "[1, 29, 56]", "one more, or equal")),
        ([1, 29, 57], [2, 30, 58], ("[1, 29, 57]", "[2, 30, 58]")),
        ([2, 30], [1, 29, 57], ("[2, 30]", "[1, 29, 57]")),
        ([0, 1, 2], None, ("the input of layer 0 is the embedding", "count layers from 1")),
        ([3, 1], None, (f"{KEY}: expected distinct layer numbers in ascending order, got [3, 1]",)),
        (None, [32, 1, 17], ("ascending order, got [32, 1, 17]", "the order in which layers run")),
    ],
)
def test_what_is_refused(top: Ids, nested: Ids, parts: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_aux_layer_ids(config(top, nested), "draft/config.json")
    assert caught.value.where.startswith("draft/config.json")
    assert caught.value.fix
    for part in parts:
        assert part in f"{caught.value.what} {caught.value.fix}"


def test_a_draft_is_read_by_them(tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft")
    edit_json(folder / "config.json", **{SECTION: None, KEY: [2, 4, 5]})
    draft = read_draft(Checkpoint.open(folder))
    assert (draft.geometry.aux_layer_ids, draft.geometry.num_aux_layers) == ((1, 3, 4), 3)
    edit_json(folder / "config.json", **{SECTION: {KEY: [2, 3, 4]}})
    with pytest.raises(CheckpointError, match="are not the same layers"):
        read_draft(Checkpoint.open(folder))
