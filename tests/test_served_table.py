"""The table of served drafts in experiments/served."""

import importlib
from pathlib import Path

from served import results
from served.drafts import SERVED_PAIRS, UNIT_CACHE, UNQUANTIZED

FAMILIES = {pair.family for pair in SERVED_PAIRS}
NOT_ON_THIS_CPU = {
    "blackwell-nvfp4", "blackwell-nvfp4-learned", "mi325x-w4a8", "mi325x-w4a8-gptq",
    "mi355-mxfp4", "mi355-mxfp4-learned", "mxfp4-weights", "mxfp4-weights-gptq",
    "nvfp4-weights", "nvfp4-weights-gptq",
}  # fmt: skip
"""Recipes that vLLM refuses on the CPU of the table; what it refuses beside them is a loss."""
WITH_HEAD = {"fp8-ptpc-head", "int4-channel-gptq-head", "int4-group128-gptq-head"}
"""Served where vLLM takes such a head: its class of MLA drafts refuses it, and the shipped DFlash
draft has none."""

NOT_SERVED_YET = {
    "blackwell-nvfp4-weights", "int8-channel", "int8-channel-head", "mi355-w4a8-gptq",
}  # fmt: skip
"""Recipes that are younger than the table."""


def test_the_page_has_the_table_of_today() -> None:
    text = results.RESULTS_FILE.read_text(encoding="utf-8")
    assert text.endswith(results.table(results.read_results())), "experiments/run served --tables"


def test_served_and_replayed_agree() -> None:
    by_family: dict[str, list[results.Served]] = {}
    for row in results.read_results():
        by_family.setdefault(row.family, []).append(row)
    assert set(by_family) == FAMILIES
    recipes = {path.stem for path in Path(__file__).parents[1].glob("recipes/*.yaml")}
    for family, rows in by_family.items():
        other = set() if family == "eagle3-llama" else WITH_HEAD
        assert (recipes - other - NOT_SERVED_YET) | {UNQUANTIZED} < {row.draft for row in rows}
        no_cache = {UNIT_CACHE} if family == "eagle3-mla" else set()
        refused = {row.draft for row in rows if row.error is not None}
        assert refused == NOT_ON_THIS_CPU | no_cache
        for row in rows:
            if row.error is not None:
                continue
            assert row.difference < 0.03, row
            assert row.num_equal >= 0.9 * row.num_compared, row
            assert row.num_unexplained <= 0.02 * row.num_compared, row


def test_the_scripts_of_a_served_run_import_what_there_is() -> None:
    for name in ("run", "recording"):
        importlib.import_module(f"served.{name}")
