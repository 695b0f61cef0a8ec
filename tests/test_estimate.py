"""Estimates, of K = 3 and 4,096 positions if not said: bytes by hand, roofline, break-even."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant import api as dq
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.estimate.draft_step import (
    draft_round,
    multiplied_as,
    plain_weights,
    planned_weights,
)
from draftquant.quantize.estimate.estimate_report import to_mapping
from draftquant.quantize.estimate.work import Machine, Pass, Round, VerifyStep
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.gpus import GPUS
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.scripts.cli import main
from draftquant.scripts.dev.real_shapes.drafts import REAL_DRAFTS
from draftquant.scripts.dev.real_shapes.generate import write_sparse_model
from test_eagle3_forward import peagle
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_mtp import tiny_mimo_mtp

DRAFT = Path(__file__).parent / "pairs" / "eagle3-llama" / "draft"
LLAMA = "kimi-k2.5-eagle3"
PUBLISHED = {
    LLAMA: ("eagle3-llama", 14, 3_178_262_528),
    "kimi-k2.5-eagle3-mla": ("eagle3-mla", 17, 3_015_604_224),
    "kimi-k2.6-eagle3-mla": ("eagle3-mla", 17, 3_015_604_224),
    "nvidia-kimi-k2.6-eagle3": ("eagle3-mla", 16, 1_841_199_104),
    "kimi-linear-dflash": ("dflash", 58, 451_243_728),
}
"""Family, tensors and parameters of each draft."""


def write_headers(folder: Path, name: str, prefix: str = "") -> Checkpoint:
    """A published draft without data."""
    config = REAL_DRAFTS[name].config(1)
    shapes = REAL_DRAFTS[name].shapes(config)
    return write_sparse_model(folder, config, {prefix + one: shapes[one] for one in shapes})


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Draft]:
    folder = tmp_path_factory.mktemp("estimate")
    return {name: read_draft(write_headers(folder / name, name)) for name in REAL_DRAFTS}


def round_of(draft: Draft, recipe: str | None = None, *, k: int = 3, tp: int = 1) -> Round:
    weights = plain_weights(draft)
    if recipe:
        weights = planned_weights(make_plan(load_recipe(recipe), draft))
    return draft_round(draft, weights, VerifyStep(k, 4096, tp))


def parts(read: Pass | Round, concurrency: int = 1) -> dict[str, int]:
    names = ("attention", "mlp", "fusion", "head", "embedding", "norm", "kv_cache", "other")
    found = {name: read.nbytes(concurrency, name) for name in names}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def test_the_sizes_are_those_of_the_published_drafts(drafts: dict[str, Draft]) -> None:
    for name, draft in drafts.items():
        count = sum(row.tensor.numel for row in draft.rows)
        assert (draft.family.name, len(draft.rows), count) == PUBLISHED[name]
        assert draft.checkpoint.nbytes == 2 * count
    assert drafts.keys() == PUBLISHED.keys()


# ---- bytes


def test_a_block_draft_reads_its_cache_twice_and_the_targets_head(drafts: dict[str, Draft]) -> None:
    whole = round_of(drafts["kimi-linear-dflash"], k=15)
    assert [(one.name, one.repeats) for one in whole.passes] == [("features", 1), ("block", 1)]
    square = 2 * 2304 * 2304
    assert parts(whole.step) == {
        "attention": 5 * 4 * square,
        "mlp": 5 * 2 * 3 * 9216 * 2304,
        "head": 2 * 163840 * 2304,  # which the draft does not have
        "embedding": 16 * 2 * 2304,
        "norm": 5 * 2 * (2 * 2304 + 2 * 72) + 2 * 2304,
        "kv_cache": 5 * (4096 + 16) * 2 * 32 * 72 * 2,  # the context and the block itself
    }
    assert parts(whole.passes[0]) == {
        "fusion": 5 * square,
        "norm": 2 * 2304 + 5 * 2 * 72,  # hidden_norm and the k_norms
        "attention": 5 * 2 * square,  # k and v of what was verified
    }


def test_quantized_inputs_of_a_block_draft_lose_the_fused_context(drafts: dict[str, Draft]) -> None:
    """Then q is read besides k and v for the verified positions."""
    fused, apart = (round_of(drafts["kimi-linear-dflash"], r, k=15) for r in (None, "fp8-ptpc"))
    assert parts(fused.passes[0])["attention"] == 5 * 2 * 2 * 2304 * 2304
    assert parts(apart.passes[0])["attention"] == 5 * 3 * (2304 * 2304 + 4 * 2304)
    for one, matrices in ((fused, 2), (apart, 3)):
        works = [work for work in one.passes[0].works if work.part == "attention"]
        assert sum(w.sequence_flops for w in works) == 16 * 2 * matrices * 5 * 2304 * 2304


def test_int4_with_fp8_inputs_is_half_a_byte_on_disk_and_one_in_memory(tmp_path: Path) -> None:
    """Our plugin unpacks it; W4A16 stays packed. Beside it are float32 scales of its rows."""
    folder = tiny_eagle3_llama(tmp_path / "draft")
    names = ["fp8-ptpc", "mi325x-w4a8", "mi325x-w4a8-gptq", "int4-channel"]
    of_name = {one.name: one for one in dq.estimate(folder, recipes=names).candidates}
    read = {name: parts(one.round.step)["mlp"] for name, one in of_name.items()}
    halves = {name: round(2 * nbytes / (read["BF16"] // 2)) for name, nbytes in read.items()}
    assert halves == {"BF16": 4, "fp8-ptpc": 2, **dict.fromkeys(names[1:3], 2), "int4-channel": 1}
    stored = {name: one.stored_bytes for name, one in of_name.items()}
    assert stored["mi325x-w4a8"] == stored["mi325x-w4a8-gptq"] < 0.9 * stored["fp8-ptpc"]


def test_a_mark_is_explained_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny_eagle3_llama(tmp_path / "draft"))
    for recipe, marks in (("fp8-ptpc", 0), ("mi325x-w4a8", 2)):
        assert main(["estimate", folder, "--gpu", "mi325x", "--recipe", recipe]) == 0
        assert capsys.readouterr().out.count("†") == marks


def test_windows_and_pruned_vocabularies_are_read_in_part(tmp_path: Path) -> None:
    config = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100}
    folder = tiny_dflash(tmp_path / "sliding", num_layers=2, config=config)
    whole = round_of(read_draft(Checkpoint.open(folder)), k=7)
    row = 2 * 2 * 32 * 2  # keys and values of 2 heads of 32
    caches = [w.sequence_bytes for w in whole.step.works if w.part == "kv_cache"]
    assert caches == [(100 + 8) * row, (4096 + 8) * row]
    folder = tiny_eagle3_llama(tmp_path / "pruned", pruned_vocabulary=True)
    step = round_of(read_draft(Checkpoint.open(folder))).step
    assert step.nbytes(1, "other") == 8  # one I64 of d2t; t2d is not read
    assert step.nbytes(1, "head") == 48 * 64 * 2


def test_a_cache_of_eight_bits_is_half_as_many_bytes() -> None:
    recipe = {"name": "cached", "summary": "s", "extends": "fp8-ptpc"}
    own = {**recipe, "kv_cache": {"dtype": "fp8_e4m3", "scales": "unit"}}
    plain, cached = dq.estimate(DRAFT, recipes=[own], gpus=["h200"]).candidates
    before, after = (parts(one.round.step)["kv_cache"] for one in (plain, cached))
    assert before == 2 * after > 0


ROWS: dict[str, tuple[Callable[[Path], Path], int, list[int]]] = {
    "chain": (tiny_eagle3_llama, 2 * 3, [1, 1, 2]),
    "parallel": (peagle, 2 * 3, [1, 1]),
    "layer of its target": (tiny_mimo_mtp, 2 * 3, [1, 1, 2]),
    "block": (tiny_dflash, 3 + 1, [1, 1]),
}
"""How a draft of K = 3 is made, the rows through its layers in a verify step, its passes."""


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_a_verify_step(kind: str, tmp_path: Path) -> None:
    """K + 1 tokens that were committed, and a chain's K - 1 own ones, or as many masks beside."""
    build, rows, repeats = ROWS[kind]
    draft = read_draft(Checkpoint.open(build(tmp_path / "draft")))
    passes = round_of(draft, k=3).passes
    assert [one.repeats for one in passes] == repeats
    for part, expected in (("mlp", rows), ("head", 3)):
        numbers = sum(row.tensor.numel for row in draft.rows if row.role == part)
        numbers = numbers or draft.geometry.draft_vocab_size * draft.geometry.hidden_size
        works = [(one.repeats, w) for one in passes for w in one.works if w.part == part]
        assert sum(n * w.sequence_flops for n, w in works) == 2 * numbers * expected, part


# ---- shards


def test_gpus_share_what_engines_share(drafts: dict[str, Draft], tmp_path: Path) -> None:
    works = round_of(drafts["kimi-k2.5-eagle3-mla"], tp=8).passes
    shards = {(w.part, w.byte_shards, w.flop_shards) for one in works for w in one.works}
    assert shards == {
        ("fusion", 1, 1),
        ("norm", 1, 1),
        ("embedding", 1, 1),
        ("attention", 1, 1),  # q_a and kv_a
        ("attention", 8, 8),
        ("mlp", 8, 8),
        ("head", 8, 8),
        ("kv_cache", 1, 8),  # every GPU reads the latents, for its own heads
    }
    draft = read_draft(Checkpoint.open(tiny_eagle3_llama(tmp_path / "draft")))
    every = [w for one in round_of(draft, tp=4).passes for w in one.works]
    shards = {(w.part, w.byte_shards, w.flop_shards) for w in every if w.byte_shards == 2}
    assert shards == {("attention", 2, 2), ("kv_cache", 2, 4)}  # two heads of keys, held twice


# ---- roofline


@pytest.mark.parametrize(
    ("gpu", "recipe", "unit", "gains"),
    [
        ("b200", "blackwell-nvfp4", "nvfp4", True),
        ("mi355x", "mi355-mxfp4", "mxfp4", True),
        ("h100", "blackwell-nvfp4", "bf16", True),  # Marlin widens as it reads
        ("mi325x", "mi355-mxfp4", "bf16", False),  # emulated
        ("mi355x", "blackwell-nvfp4", "bf16", False),
        ("a100", "fp8-ptpc", "bf16", True),
        ("b200", "nvfp4-weights", "bf16", True),  # as on h100, its inputs have 16 bits
        ("mi355x", "mi355-w4a8-gptq", "mxfp4_fp8", True),
        ("mi325x", "mi355-w4a8-gptq", "bf16", False),  # though it multiplies FP8
        ("h200", "mi355-w4a8-gptq", "bf16", False),
        ("mi355x", "mxfp4-weights", "bf16", False),  # vLLM has kernels for MXFP4 inputs only
    ],
)
def test_what_a_gpu_makes_of_formats_that_it_may_not_multiply(
    drafts: dict[str, Draft], gpu: str, recipe: str, unit: str, gains: bool
) -> None:
    machine = Machine(gpu=GPUS[gpu], efficiency=1.0)
    assert machine.gpu.computes_in(multiplied_as(load_recipe(recipe))) == unit
    steps = [round_of(drafts[LLAMA], each).passes[1].works for each in (None, recipe)]
    of_mlp = ([work for work in works if work.part == "mlp"] for works in steps)
    before, after = (sum(machine.work_seconds(w, 1) for w in works) for works in of_mlp)
    assert (after < before) == gains
    if not gains:  # packed, written out in 16 bits, read again
        packed = round_of(drafts[LLAMA], recipe).step.nbytes(1, "mlp")
        assert after == pytest.approx((packed + 4 * 3 * 12288 * 7168) / machine.gpu.bandwidth)


@pytest.mark.parametrize(
    ("gpu", "count", "petaflops"),
    [("b300", 8, (18, 36, 105, 105)), ("gb300", 72, (180, 360, 1080, 1080))],
)
def test_a_gpu_is_its_share_of_many(gpu: str, count: int, petaflops: tuple[int, ...]) -> None:
    one = GPUS[gpu]
    found = [count * one.peaks[unit] / 1e15 for unit in ("bf16", "fp8", "nvfp4", "mxfp4")]
    assert found == pytest.approx(petaflops)
    assert (one.arch, one.bandwidth) == ("sm103", 8e12)


def test_break_even_beside_a_measured_verify_step() -> None:
    asked: dict[str, Any] = {"recipes": ["fp8-ptpc"], "gpus": ["h200"], "target_step_ms": 8}
    report = dq.estimate(DRAFT, concurrency=2, **asked)
    machine, (plain, fp8) = report.machines[0], report.candidates
    ours, theirs = (machine.round_seconds(one.round, 2) for one in (plain, fp8))
    assert report.verify_seconds == pytest.approx(8e-3)
    assert report.break_even(fp8, machine) == pytest.approx((ours - theirs) / (ours + 8e-3))
    times = {one["name"]: one["times"][0] for one in to_mapping(report)["drafts"]}
    assert times["fp8-ptpc"]["round_seconds"] == theirs


def test_the_bytes_in_a_row_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(DRAFT), "--gpu", "h200", "--recipe", "fp8-ptpc"]) == 0
    rows = re.findall(r"│ (?:BF16|fp8-ptpc) +│((?: +[\d.]+ MB │){6})", capsys.readouterr().out)
    assert len(rows) == 2
    for row in rows:
        _, *by_part, step = (float(cell) for cell in re.findall(r"[\d.]+", row))
        assert sum(by_part) == pytest.approx(step, abs=0.005 * 5)  # each printed to 0.01 MB
    emulated = ["--recipe", "mi355-mxfp4", "--gpu", "mi325x", "--target-step-ms", "8"]
    assert main(["estimate", str(DRAFT), *emulated]) == 0  # slower, as is told
