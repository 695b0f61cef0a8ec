"""Estimates: bytes of published drafts worked by hand, roofline, break-even, errors.

Published drafts are headers without data; K = 3 and 4,096 positions of context if not said.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.estimate.draft_step import (
    draft_round,
    multiplied_as,
    plain_weights,
    planned_weights,
)
from draftquant.quantize.estimate.work import (
    Machine,
    Pass,
    Round,
    VerifyStep,
    break_even_loss,
)
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.gpus import GPUS, USUAL_GPUS
from draftquant.quantize.planning.quantization_plan import Plan, make_plan
from draftquant.recipes import built_in_recipes, load_recipe
from draftquant.recipes.formats import FP8_CACHE
from draftquant.scripts.cli import main
from draftquant.scripts.dev.real_shapes.drafts import REAL_DRAFTS
from hypothesis import given
from hypothesis import strategies as st
from test_real_shapes import write_headers
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash

PAIRS = Path(__file__).parent / "pairs"
HEAD = 163840 * 7168 * 2
"""Of the Kimi heads: BF16, full vocabulary. embed_tokens is as large."""
LLAMA = "kimi-k2.5-eagle3"


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Draft]:
    folder = tmp_path_factory.mktemp("estimate")
    return {name: read_draft(write_headers(folder / name, name)) for name in REAL_DRAFTS}


def round_of(
    draft: Draft, recipe: str | None = None, *, k: int = 3, context: int = 4096, tp: int = 1
) -> Round:
    weights = planned_weights(planned(draft, recipe)) if recipe else plain_weights(draft)
    return draft_round(draft, weights, VerifyStep(k, context, tp))


def planned(draft: Draft, recipe: str) -> Plan:
    return make_plan(load_recipe(recipe), draft)


def parts(read: Pass | Round, concurrency: int = 1) -> dict[str, int]:
    names = ("attention", "mlp", "fusion", "head", "embedding", "norm", "kv_cache", "other")
    found = {name: read.nbytes(concurrency, name) for name in names}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


# ---- bytes


def test_a_step_of_the_llama_head_of_kimi_by_hand(drafts: dict[str, Draft]) -> None:
    whole = round_of(drafts[LLAMA])
    step = {
        "attention": 2 * (3 * 8192 * 14336 + 7168 * 8192),
        "mlp": 2 * 3 * 12288 * 7168,
        "head": HEAD,
        "embedding": 2 * 7168,  # a row, not the table
        "norm": 2 * 4 * 7168,
        "kv_cache": 4096 * 2 * 64 * 128 * 2,  # keys and values of 64 heads
    }
    assert parts(whole.step) == step
    assert whole.step.nbytes(1) == 3_833_665_536
    fc = 2 * 7168 * 3 * 7168
    thrice = {part: 3 * nbytes for part, nbytes in step.items()}
    # The first step takes the K + 1 tokens that were verified: 4 rows, then 1 and 1.
    assert parts(whole) == {**thrice, "embedding": 6 * 2 * 7168, "fusion": fc}
    assert [(one.name, one.repeats) for one in whole.passes] == [
        ("features", 1),
        ("first step", 1),
        ("step", 2),
    ]


def test_int4_per_channel_on_it_by_hand(drafts: dict[str, Draft]) -> None:
    whole = round_of(drafts[LLAMA], "int4-channel")
    codes, rows = (3 * 8192 * 14336 + 7168 * 8192) // 2, 3 * 8192 + 7168
    assert parts(whole.step)["attention"] == codes + 2 * rows + 4 * 16  # BF16 scales, 4 shapes
    codes, rows = 3 * 12288 * 7168 // 2, 2 * 12288 + 7168
    assert parts(whole.step)["mlp"] == codes + 2 * rows + 3 * 16
    assert whole.step.nbytes(1, "head") == HEAD


def test_mla_reads_one_latent_row_per_position(drafts: dict[str, Draft]) -> None:
    whole = round_of(drafts["kimi-k2.5-eagle3-mla"])
    assert whole.step.nbytes(1, "kv_cache") == 4096 * (512 + 64) * 2
    assert whole.step.nbytes(1, "attention") == 2 * 116_260_864  # kv_b_proj, absorbed, too
    caches = [w for one in whole.passes[1:] for w in one.works if w.part == "kv_cache"]
    # 4 positions attend in the first step, 1 later: scores over 576, sums over 512.
    assert [w.sequence_flops for w in caches] == [
        queries * 64 * 4096 * 2 * (576 + 512) for queries in (4, 1)
    ]


def test_a_block_draft_reads_keys_and_values_twice_and_the_targets_head(
    drafts: dict[str, Draft],
) -> None:
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


@pytest.mark.parametrize(
    ("recipe", "code_bytes", "row_bytes"),
    [("int4-channel", 0.5, 2), ("fp8-ptpc", 1, 4)],  # scales of a row in BF16 and F32
)
def test_quantized_inputs_of_a_block_draft_lose_the_fused_context(
    drafts: dict[str, Draft], recipe: str, code_bytes: float, row_bytes: int
) -> None:
    """Then q is read besides k and v for the verified positions."""
    fused, apart = (round_of(drafts["kimi-linear-dflash"], one, k=15) for one in (None, recipe))
    assert parts(fused.passes[0])["attention"] == 5 * 2 * 2 * 2304 * 2304
    shapes = 16 if recipe == "int4-channel" else 0
    each = code_bytes * 2304 * 2304 + row_bytes * 2304 + shapes
    assert parts(apart.passes[0])["attention"] == 5 * 3 * each
    flops = [
        sum(w.sequence_flops for w in one.passes[0].works if w.part == "attention")
        for one in (fused, apart)
    ]
    assert flops == [16 * 2 * n * 5 * 2304 * 2304 for n in (2, 3)]


def test_a_cache_in_fp8_is_half_of_it(drafts: dict[str, Draft]) -> None:
    """Of 64 key-value heads of 128 elements, and of a latent row of 512 + 64."""
    for name, row in ((LLAMA, 2 * 64 * 128), ("kimi-k2.5-eagle3-mla", 512 + 64)):
        draft = drafts[name]
        wide, narrow = (
            draft_round(draft, plain_weights(draft), VerifyStep(1, 9), kv_cache=one)
            for one in (None, FP8_CACHE)
        )
        assert wide.nbytes(1, "kv_cache") == 2 * narrow.nbytes(1, "kv_cache") == 9 * row * 2


def test_a_sliding_layer_reads_its_window(tmp_path: Path) -> None:
    sliding = ["sliding_attention", "full_attention"]
    config = {"layer_types": sliding, "sliding_window": 100}
    draft = read_draft(
        Checkpoint.open(tiny_dflash(tmp_path / "draft", num_layers=2, config=config))
    )
    caches = [w for w in round_of(draft, k=7).step.works if w.part == "kv_cache"]
    row = 2 * 2 * 32 * 2  # keys and values of 2 heads of 32
    assert [w.sequence_bytes for w in caches] == [(100 + 8) * row, (4096 + 8) * row]


def test_a_pruned_vocabulary_is_looked_up_by_the_row(tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    step = round_of(read_draft(Checkpoint.open(folder))).step
    assert step.nbytes(1, "other") == 8  # one I64 of d2t; t2d is not read
    assert step.nbytes(1, "head") == 48 * 64 * 2


@pytest.mark.each_value
@pytest.mark.parametrize("name", REAL_DRAFTS)
@pytest.mark.parametrize("recipe", built_in_recipes())
def test_what_is_read_is_what_the_plan_stores(
    drafts: dict[str, Draft], name: str, recipe: str
) -> None:
    """But for tables, of which rows are read, and for what is the target's."""
    draft, plan = drafts[name], planned(drafts[name], recipe)
    whole = draft_round(draft, planned_weights(plan), VerifyStep(3, 4096))
    own = [w for w in whole.step.works if draft.row("lm_head.weight") or w.part != "head"]
    step = sum(work.weight_bytes for work in own)
    features = whole.passes[0].nbytes(1, "fusion")
    if name == "kimi-linear-dflash":
        features += 2 * 2304  # hidden_norm
    embedding = HEAD if draft.row("embed_tokens.weight") else 0
    assert step + features == plan.bytes_after - embedding


# ---- shards


def test_two_gpus_share_what_engines_share(drafts: dict[str, Draft]) -> None:
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


# ---- roofline


def mlp_seconds(machine: Machine, whole: Round, concurrency: int) -> float:
    return sum(
        machine.work_seconds(w, concurrency) for w in whole.passes[1].works if w.part == "mlp"
    )


@pytest.mark.parametrize(
    ("gpu", "recipe", "unit", "gains"),
    [
        ("b200", "blackwell-nvfp4", "nvfp4", True),
        ("b200", "mi355-mxfp4", "mxfp4", True),
        ("mi355x", "mi355-mxfp4", "mxfp4", True),
        ("h100", "blackwell-nvfp4", "bf16", True),  # Marlin widens as it reads
        ("h100", "mi355-mxfp4", "bf16", True),
        ("mi325x", "mi355-mxfp4", "bf16", False),  # emulated
        ("mi355x", "blackwell-nvfp4", "bf16", False),
        ("a100", "fp8-ptpc", "bf16", True),
        ("b200", "nvfp4-weights", "bf16", True),  # as on h100, its inputs have 16 bits
        ("mi355x", "mxfp4-weights", "bf16", False),  # vLLM has kernels for MXFP4 inputs only
    ],
)
def test_what_a_gpu_makes_of_formats_that_it_may_not_multiply(
    drafts: dict[str, Draft], gpu: str, recipe: str, unit: str, gains: bool
) -> None:
    machine = Machine(gpu=GPUS[gpu], efficiency=1.0)
    assert machine.gpu.computes_in(multiplied_as(load_recipe(recipe))) == unit
    before, after = (mlp_seconds(machine, round_of(drafts[LLAMA], r), 1) for r in (None, recipe))
    assert (after < before) == gains
    if not gains:  # packed, written out in 16 bits, read again
        packed = round_of(drafts[LLAMA], recipe).step.nbytes(1, "mlp")
        assert after == pytest.approx((packed + 4 * 3 * 12288 * 7168) / machine.gpu.bandwidth)


SETTINGS = st.fixed_dictionaries(
    {
        "recipe": st.sampled_from([None, *built_in_recipes()]),
        "k": st.integers(1, 15),
        "context": st.integers(1, 200_000),
        "concurrency": st.integers(1, 300),
        "gpu": st.sampled_from(sorted(GPUS)),
    }
)


@pytest.mark.slow
@given(settings=SETTINGS, name=st.sampled_from(sorted(REAL_DRAFTS)), more=st.integers(1, 50))
def test_more_work_never_takes_less_time(
    drafts: dict[str, Draft], settings: dict[str, Any], name: str, more: int
) -> None:
    def seconds(*, tp: int = 1, efficiency: float = 0.5, **changes: int) -> float:
        chosen = {**settings, **changes}
        whole = round_of(
            drafts[name], chosen["recipe"], k=min(chosen["k"], 15), context=chosen["context"], tp=tp
        )
        machine = Machine(gpu=GPUS[chosen["gpu"]], efficiency=efficiency)
        return machine.round_seconds(whole, chosen["concurrency"])

    before = seconds()
    assert before > 0
    for setting in ("k", "context", "concurrency"):
        assert seconds(**{setting: settings[setting] + more}) >= before
    assert seconds(tp=8) <= before
    assert seconds(efficiency=1.0) == pytest.approx(before / 2)


# ---- break-even


def test_break_even_by_hand() -> None:
    assert break_even_loss(10, 8, 30) == 0.05
    assert break_even_loss(10, 10, 30) == 0
    assert break_even_loss(8, 10, 30) < 0


# ---- hardware


def test_every_gpu_is_whole() -> None:
    for name, gpu in GPUS.items():
        assert gpu.name == name == name.lower()
        assert gpu.source.startswith("https://")
        assert 0.5e12 < gpu.bandwidth < 10e12
        assert gpu.peaks["bf16"] >= 300e12
        fp4 = 6 if gpu.arch == "sm103" else 4  # of Blackwell Ultra
        faster = {"bf16": 1, "fp8": 2, "nvfp4": fp4, "mxfp4": fp4}
        for precision, peak in gpu.peaks.items():
            assert peak == pytest.approx(faster[precision] * gpu.peaks["bf16"], rel=0.03)
    assert set(USUAL_GPUS) < set(GPUS)


# ---- the command


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["estimate", *arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    found: dict[str, Any] = json.loads(output.out)
    return found


def test_json_of_a_small_pair(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(
        capsys, str(PAIRS / "eagle3-llama" / "draft"), "--gpu", "h100", "--target-step-ms", "2.5",
        "--context", "512", "--concurrency", "8", "--recipe", "int4-channel", "--recipe",
        "fp8-ptpc", "--recipe", "int4-channel",
    )  # fmt: skip
    assert (found["family"], found["num_draft_tokens"], found["context"]) == (
        "eagle3-llama",
        3,
        512,
    )
    assert (found["parameters"], found["tp"], found["efficiency"]) == (1_541_120, 1, 0.75)
    assert [one["name"] for one in found["drafts"]] == ["BF16", "int4-channel", "fp8-ptpc"]
    plain, int4 = found["drafts"][:2]
    assert (plain["stored_bytes"], int4["stored_bytes"]) == (3_082_240, 1_858_160)
    # 4 key heads of 32 at 512 positions; gate, up, down of 640 x 256.
    assert plain["step_bytes"]["kv_cache"] == 512 * 2 * 4 * 32 * 2
    assert plain["step_bytes"]["mlp"] == 2 * 3 * 640 * 256
    assert "fusion" not in plain["step_bytes"]
    assert plain["round_bytes"]["fusion"] == 2 * 768 * 256
    assert plain["engines"] is None
    assert int4["engines"] == {"h100": ["vllm", "sglang"]}
    (before,), (after,) = plain["times"], int4["times"]
    assert (after["gpu"], after["concurrency"]) == ("h100", 8)
    (nothing,), (lost,) = plain["break_even"], int4["break_even"]
    assert (lost["gpu"], lost["concurrency"], lost["verify_seconds"]) == ("h100", 8, 0.0025)
    gained = before["round_seconds"] - after["round_seconds"]
    assert nothing["loss"] == 0 < lost["loss"]
    assert lost["loss"] == pytest.approx(gained / (before["round_seconds"] + 0.0025))


@pytest.mark.parametrize(("given", "context"), [((), 512), (("--context", "4096"), 4096)])
def test_the_context_follows_the_config_unless_it_is_given(
    given: tuple[str, ...], context: int, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = str(PAIRS / "eagle3-llama" / "draft")
    found = run_json(capsys, draft, "--gpu", "h200", "--recipe", "fp8-ptpc", *given)
    assert found["context"] == context
