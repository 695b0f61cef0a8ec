"""The list of published drafts: its form, and that `wild/README.md` is what the commands say."""

import re
from pathlib import Path

import pytest
from by_recipe import draft_of
from wild_answers import TABLE_FILE, ask, table
from wild_drafts import shapes_of, wild_drafts

pytestmark = pytest.mark.usefixtures("one_thread")

DRAFTS = wild_drafts()
FAMILIES = {"peagle": "eagle3-llama", "causal-lm": "language-model", "listed": "unknown"}
"""Of the kinds that are called otherwise."""
UNKNOWN = {"medusa", "eagle1", "eagle4", "domino", "eagle3-moe"}
REFUSED_FOR_A_KEY = {
    "SpecForge qwen3.5-4b-mtp": "attn_output_gate: expected True",  # its first layers
    "RedHatAI GLM-5.2 dspark": "markov_rank: missing key",  # quoted in part
}
LISTED = {
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DSpark": "dspark",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DFlash": "dflash",
    "google/gemma-4-31B-it-assistant": "gemma4-assistant",
    "Inferact/Kimi-K3-DSpark": "dspark-mla",
}
"""Those of the kind "listed" that a family reads."""
SAMPLE = "AngelSlim hunyuan-1.8b-eagle3", "SpecForge qwen3-8b-domino", "ModelOpt default eagle head"
"""Asked everything here; `tests/wild_answers.py` asks about all of them."""
WRITTEN = TABLE_FILE.read_text(encoding="utf-8")


def cells(text: str, name: str) -> list[str]:
    """The cells of a draft's first row, without the numbers of errors."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.partition(" (")[0] for cell in row.split(" | ")]


def test_every_draft_is_read_or_told_what_it_is(tmp_path: Path) -> None:
    for i, draft in enumerate(DRAFTS):
        folder = draft.write(tmp_path / str(i))
        named = draft.tensors["kind"]
        why = REFUSED_FOR_A_KEY.get(draft.name)
        if why is None:
            read = draft_of(folder)
            known = "unknown" if named in UNKNOWN else FAMILIES.get(named, named)
            assert read.family.name == LISTED.get(draft.name, known), draft.name
            rows = [row for row in read.rows if named != "listed" or row.tensor.numel > 1]
            assert all(row.given is None or row.given for row in rows), draft.name
            assert {row.tensor.name for row in read.rows} == set(shapes_of(draft, draft.config))
            continue
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one, the text says
            draft_of(folder)
        assert why in str(caught.value), draft.name


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_the_table_is_what_the_commands_say(name: str, tmp_path: Path) -> None:
    draft = next(draft for draft in DRAFTS if draft.name == name)
    assert cells(WRITTEN, name) == cells(table([ask(draft, tmp_path)]), name)


def test_the_page_of_limits_says_the_figures_of_the_table() -> None:
    said = WRITTEN.partition("\n\n")[2].partition("\n\n")[0]
    count, planned, quantized, replayed, decided, named = re.findall(r"\d+", said)
    page = " ".join((TABLE_FILE.parents[2] / "docs/limits.md").read_text(encoding="utf-8").split())
    assert planned == quantized
    assert f"Of {count} published configs" in page
    assert f"{planned} are planned, quantized and verified, {replayed} are replayed" in page
    assert f"`check` decides {decided} for both engines" in page
    assert int(named) <= int(count)
