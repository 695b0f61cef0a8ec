"""The table of served drafts in experiments/served, and how rounds are compared."""

import dataclasses
import importlib
from pathlib import Path

import corpus
import torch
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.quantize.drafts.draft_cache import CacheScales
from draftquant.quantize.stored.loading import load_draft
from served import cpu, results
from served.cpu import on_cpu, towards_zero
from served.drafts import SERVED_PAIRS, UNIT_CACHE, UNQUANTIZED
from served.every_position import EveryPosition
from served.rounds import Rounds, compare
from tiny import tiny_eagle3_llama

K = 2
PROMPT = 3
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


def trace(*continuation: int) -> PromptTrace:
    tokens = torch.tensor([7] * PROMPT + list(continuation))
    return PromptTrace(
        id="a",
        category="a",
        prompt_length=PROMPT,
        token_ids=tokens,
        features=torch.zeros(len(tokens) - 1, 1),
        target_top1=tokens[1:],
    )


def compared(text: list[int], steps: list[int], here: list[int], *continuation: int) -> Rounds:
    clear = ((9.0,) * K,) * len(here)
    places = EveryPosition(accepted=tuple(here), distances=clear)
    return compare([text], [steps], [trace(*continuation)], [places], K, near=0.5)


def test_every_round_is_held_against_replay_at_its_own_place() -> None:
    text = [1, 2, 3, 4, 5, 6]
    found = compared(text, [1, 0, 2], [1, 9, 0, 2], *text)
    assert found.compared == ((1, 1), (0, 0), (2, 2))
    assert found.num_equal == 3
    assert found.replayed == (1, 0, 2)
    assert found.num_same_text == 1
    found = compared(text, [0, 0, 2], [1, 0, 2, 0], *text)  # which does not shift the next ones
    assert found.compared == ((0, 1), (0, 0), (2, 2))
    assert found.num_equal == 2
    found = compared([1, 2, 3, 9, 9, 9], [1, 1, 1], [1, 0, 0, 0], *text)  # behind common text
    assert (found.compared, found.num_same_text) == (((1, 1),), 0)


def test_a_round_that_differs_is_looked_up_where_it_parted() -> None:
    """The engine accepts none where replay accepts one, and two where replay accepts one."""
    text = [1, 2, 3, 4, 5, 6]
    distances = ((0.4, 9.0), (9.0, 9.0), (9.0, -0.4), (9.0, 9.0))
    for near, ties in ((0.5, 2), (0.3, 0)):
        places = EveryPosition(accepted=(1, 0, 1, 0), distances=distances)
        found = compare([text], [[0, 0, 2]], [trace(*text)], [places], K, near=near)
        assert found.compared == ((0, 1), (0, 0), (2, 1))
        assert (found.num_equal, found.num_near_ties) == (1, ties)


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
        assert (recipes - other) | {UNQUANTIZED} < {row.draft for row in rows}
        no_cache = {UNIT_CACHE} if family == "eagle3-mla" else set()
        refused = {row.draft for row in rows if row.error is not None}
        assert refused == NOT_ON_THIS_CPU | no_cache
        for row in rows:
            if row.error is not None:
                continue
            assert row.difference < 0.03, row
            assert row.num_equal >= 0.9 * row.num_compared, row
            assert row.num_unexplained <= 0.02 * row.num_compared, row


def test_a_cpu_without_avx512_serves_int4_weights_dequantized() -> None:
    """vLLM's build for it lacks their product; W4A8 it refuses by itself, everywhere."""
    flags = "processor : 0\nflags\t\t: fpu avx2{}\n"
    assert not cpu.has_int4_product(flags.format(""))
    assert cpu.has_int4_product(flags.format(" avx512f") * 2)
    assert cpu.has_int4_product("processor : 0\nFeatures : asimd\n")
    for recipe, needs in (("int4-channel", True), ("mi325x-w4a8", False)):
        assert cpu.needs_it(corpus.quantized("eagle3-llama", recipe)) is needs
    (row,) = [
        r for r in results.read_results() if (r.family, r.draft) == ("dflash", "int4-channel")
    ]
    marked = results.table([dataclasses.replace(row, dequantized=True)])
    assert f"{row.num_equal} of {row.num_compared} (as BF16) |" in marked


def test_a_cpu_keeps_fp8_towards_zero(tmp_path: Path) -> None:
    """What the engine's op gave; a GPU takes the nearest: 1.125, 1.25, 448 and 2^-9 of these."""
    x = torch.tensor([1.078125, -1.234375, 440.0, 1e4, 0.00099945, 1.125])
    assert towards_zero(x).tolist() == [1.0, -1.125, 416.0, 448.0, 0.0, 1.125]
    draft = load_draft(tiny_eagle3_llama(tmp_path / "draft"))
    assert on_cpu(draft) is draft
    kept = on_cpu(draft.with_cache({0: CacheScales(k=(2.0,), v=(1.0,))}))
    keys, values = kept.forward.on_cache(0, x[None, None], x[None, None])
    assert keys.flatten()[1].item() == -1.125
    assert values.flatten().tolist() == towards_zero(x).tolist()


def test_the_scripts_of_a_served_run_import_what_there_is() -> None:
    for name in ("run", "recording"):
        importlib.import_module(f"served.{name}")
