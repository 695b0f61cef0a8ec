"""The curve: sizes, who judges, off-domain, bounds that hold together, speed, and its picture."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from draftquant.api import TraceFolder
from draftquant.calibration.vocabulary.row_choice import RowChooser, said_texts
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.estimate.draft_step import draft_round, plain_weights
from draftquant.quantize.estimate.work import Machine, Pass, Round, VerifyStep, Work
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.gpus import named_gpu
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes.errors import EstimateError
from draftquant.validate.comparison.right_sizes import right_sizes
from draftquant.validate.comparison.scopes import bonferroni
from draftquant.validate.comparison.size_curve import SizeCurve, drawing, size_curve, usual_sizes
from draftquant.validate.comparison.size_estimate import (
    MachineSpeeds,
    ServingSpeeds,
    SizeSpeed,
    checked_concurrencies,
    parse_step_times,
    size_speeds,
    with_vocabulary,
)
from draftquant.validate.counting.acceptance_counts import pooled
from draftquant.validate.counting.paired_change import paired_change
from draftquant.validate.counting.trace_replay import replay_drafts
from said_traces import VOCAB, write_said
from test_estimate import write_headers
from tiny import tiny_eagle3_llama
from tiny_mtp import tiny_deepseek_mtp
from tiny_speculators import tiny_speculators_eagle3

pytestmark = pytest.mark.usefixtures("one_thread")

K, SIZES = 3, (4, 12, 48)
CHOOSER = RowChooser(vocab_size=VOCAB)
FAVOURITE = {"chat": 61}
"""A word of one category alone, every other word of its text: who never saw it has no row."""


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> LoadedDraft:
    folder = tiny_eagle3_llama(tmp_path_factory.mktemp("curve") / "draft")
    return load_draft(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, TraceFolder]:
    folder = tmp_path_factory.mktemp("traces")
    return {
        name: write_said(folder / name, seed=seed, prompts=20, favourite=FAVOURITE)
        for seed, name in enumerate(("choosing", "judging"))
    }


@pytest.fixture(scope="module")
def curve(draft: LoadedDraft, traces: Mapping[str, TraceFolder]) -> SizeCurve:
    return size_curve(
        draft, CHOOSER, traces["choosing"], traces["judging"], sizes=SIZES, num_draft_tokens=K
    )


def test_other_prompts_judge_the_rows(
    draft: LoadedDraft, traces: Mapping[str, TraceFolder], curve: SizeCurve
) -> None:
    judging, level = traces["judging"], 0.0
    order = CHOOSER.order(said_texts(traces["choosing"]))
    found = right_sizes(draft, judging, [order], [(0,)] * len(judging), num_draft_tokens=K)
    (whole,) = replay_drafts([draft], judging, num_draft_tokens=K)
    assert curve.acceptance_length == pytest.approx(whole.counts.mean_acceptance_length)
    assert (curve.num_rows, curve.sizes, curve.coverage) == (VOCAB, SIZES, 1.0)
    tokens = np.concatenate([text.token_ids for text in said_texts(judging)])
    for one in curve.chosen.whole:
        counts = [own[0].counts(one.size) for own in found]
        assert one.acceptance_length == pytest.approx(pooled(counts, K).mean_acceptance_length)
        assert one.coverage == pytest.approx((order.ranks[tokens] < one.size).mean())
        # No narrower than the bounds of one size alone, no wider than Bonferroni's.
        full = [prompt.counts for prompt in whole.prompts]
        alone, most = (
            paired_change(full, counts, confidence=(1 + each) / 2).relative_bounds
            for each in (0.95, bonferroni(len(SIZES), 0.95))
        )
        assert most[0] <= one.lower <= alone[0] < one.relative_change < alone[1] <= one.upper
        level += one.lower - most[0]
    assert level > 0
    curve = size_curve(draft, CHOOSER, traces["choosing"], judging, sizes=(12,), num_draft_tokens=K)
    (only,) = curve.chosen.whole
    counts = [own[0].counts(12) for own in found]
    bounds = paired_change(full, counts, confidence=0.975).relative_bounds  # each side 2.5 %
    assert (only.lower, only.upper) == pytest.approx(bounds, abs=1e-12)


def test_a_curve_in_small_blocks_is_the_same(
    draft: LoadedDraft, traces: Mapping[str, TraceFolder], curve: SizeCurve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("draftquant.validate.comparison.right_sizes.MAX_LOGITS", 50 * VOCAB)
    both = traces["choosing"], traces["judging"]
    assert size_curve(draft, CHOOSER, *both, sizes=SIZES, num_draft_tokens=K) == curve


def test_off_domain_a_category_does_not_choose_its_own_rows(curve: SizeCurve) -> None:
    assert curve.off_domain is not None
    ways = [way.categories[0] for way in (curve.chosen, curve.off_domain)]
    inside, outside = ({one.scope: one for one in way} for way in ways)
    assert set(inside) == set(outside) == {"chat", "code"}
    # Half of the words of "chat" are one that "code" hardly says.
    assert inside["chat"].coverage > 0.6
    assert outside["chat"].coverage < 0.5
    worst = curve.off_domain.worst(0)
    assert worst is not None
    assert worst.relative_change == min(one.relative_change for one in outside.values())
    assert (worst.num_prompts, curve.num_prompts, curve.too_small) == (10, 20, ())


def test_off_domain_is_by_the_other_categories_where_there_are_any(
    draft: LoadedDraft, traces: Mapping[str, TraceFolder], tmp_path: Path
) -> None:
    alone = write_said(tmp_path / "one", prompts=6, categories=("all",))
    found = size_curve(draft, CHOOSER, alone, None, sizes=(12,), num_draft_tokens=K)
    assert (found.off_domain, found.chosen.categories) == (None, ((),))
    assert found.chosen.worst(0) is None
    assert "rows chosen by other categories" not in drawing(found, "draft")
    folder, made = traces["choosing"].folder, traces["choosing"].manifest
    twice = (replace(one, category="copies") for one in made.prompts if one.category == "chat")
    choosing = TraceFolder(folder, replace(made, prompts=(*made.prompts, *twice)))
    for names in (("chat",), ("chat", "prose")):
        out, own = tmp_path / "-".join(names), {"categories": names, "favourite": FAVOURITE}
        said = write_said(out, prompts=4, seed=2, **own)
        found = size_curve(draft, CHOOSER, choosing, said, sizes=(12,), num_draft_tokens=K)
        assert found.off_domain is not None
        assert found.off_domain.whole[0].coverage < found.chosen.whole[0].coverage - 0.1


def test_speed_weighs_what_is_read_against_what_is_lost(curve: SizeCurve) -> None:
    """Drafting reads the head and as much again as 48 rows of it; of all rows it takes 1 ms."""
    machine = Machine(gpu=named_gpu("h200"), efficiency=0.5)
    per_row = int(machine.gpu.bandwidth * machine.efficiency / 144 / 1e3)
    of_each = {}
    for size in (*curve.sizes, curve.num_rows):
        read = Work(part="head", weight_bytes=per_row * (size + 48))
        of_each[size] = Round(passes=(Pass(name="step", works=(read,)),))
    for verify in (1e-4, 2e-3):
        serving = ServingSpeeds(machines=[machine], concurrencies=[1], step_seconds={None: verify})
        (found,) = size_speeds(curve.num_rows, curve.chosen, of_each, serving)
        for one, change in zip(found.speeds, curve.chosen.whole, strict=False):
            drafting, kept = 1e-3 * (one.size + 48) / 144, 1 + change.relative_change
            assert one.drafting == pytest.approx(drafting, rel=1e-3)
            expected = kept * (1e-3 + verify) / (drafting + verify) - 1
            assert one.speed_up == pytest.approx(expected, rel=1e-2)
            assert (one.lower or 0) < (one.speed_up or 0) < (one.upper or 0)
            if one.pays_below is not None and math.isfinite(one.pays_below):
                # At that verify step it is as fast as with all rows.
                even = kept * (1e-3 + one.pays_below) / (drafting + one.pays_below)
                assert even == pytest.approx(1, abs=1e-3)
        assert found.recommended is not None
        assert found.recommended.speed_up == max(one.speed_up or 0 for one in found.speeds)
        assert found.speeds[-1].speed_up == 0
        assert set(found.range) <= {*SIZES, VOCAB}
    serving = ServingSpeeds(machines=[machine], concurrencies=[1], step_seconds={})
    whole = tuple(replace(one, relative_change=0.0) for one in curve.chosen.whole)
    (found,) = size_speeds(curve.num_rows, replace(curve.chosen, whole=whole), of_each, serving)
    assert [one.pays_below for one in found.speeds] == [*[math.inf] * len(SIZES), None]
    (found,) = size_speeds(curve.num_rows, curve.chosen, of_each, serving)
    assert (found.recommended, found.range, found.speeds[0].speed_up) == (None, (), None)


def test_the_range_is_from_the_lower_bounds_best_to_the_upper_bounds() -> None:
    rows = ((1, 0, -0.1, 0.1), *((n, 0.2, 0.15, 0.25) for n in (2, 4)), (3, 0.1, -0.2, 0.4))
    speeds = tuple(
        SizeSpeed(size=size, drafting=1e-3, pays_below=None, verify=1e-2, speed_up=speed_up,
                  lower=lower, upper=upper)
        for size, speed_up, lower, upper in rows
    )  # fmt: skip
    found = MachineSpeeds(gpu="h200", concurrency=1, speeds=speeds)
    assert (found.recommended, found.range) == (speeds[2], (3, 4))


def test_the_picture_says_what_it_shows(curve: SizeCurve) -> None:
    described = ElementTree.fromstring(drawing(curve, "draft")).findtext("{*}desc") or ""
    for one in curve.chosen.whole:
        shown = f"{one.relative_change:+.2%} ({one.lower:+.2%} to {one.upper:+.2%})"
        where = f"{one.size:,} ({one.coverage:.2%}), rows chosen by all categories"
        assert f"{where}: {shown}; its worst category: " in described
    assert "; rows chosen by other categories: " in described


# ---- what is estimated of a size


def test_a_cut_head_by_hand(tmp_path: Path) -> None:
    """Of headers alone, as published but for a prefix: 163,840 rows of 7,168."""
    draft = read_draft(write_headers(tmp_path / "kimi", "kimi-k2.5-eagle3", "draft_model."))
    cut = with_vocabulary(draft, 32_000)
    before, after = (
        draft_round(one, plain_weights(one), VerifyStep(3, 4096)).step for one in (draft, cut)
    )
    assert before.nbytes(1, "head") == 163_840 * 7168 * 2
    assert after.nbytes(1, "head") == 32_000 * 7168 * 2
    assert after.nbytes(1, "other") == 8  # of each proposal a row of d2t; t2d is not read
    for part in ("attention", "mlp", "norm", "kv_cache"):
        assert after.nbytes(1, part) == before.nbytes(1, part)
    stored = {row.canonical: row.tensor.nbytes for row in cut.rows}
    assert (stored["d2t"], stored["t2d"]) == (8 * 32_000, 163_840)
    assert stored["embed_tokens.weight"] == 163_840 * 7168 * 2
    for size in (0, -1, 163_840, 200_000):
        with pytest.raises(EstimateError, match="at least 1 and fewer than the 163,840 rows"):
            with_vocabulary(draft, size)


def test_cut_heads_of_other_folders(tmp_path: Path) -> None:
    """Of a draft that had the target's head, and one whose config.json has a size at the top."""
    draft = read_draft(write_headers(tmp_path / "linear", "kimi-linear-dflash"))
    cut = with_vocabulary(draft, 8_000)
    step = draft_round(cut, plain_weights(cut), VerifyStep(15, 4096)).step
    assert (step.nbytes(1, "head"), step.nbytes(1, "other")) == (8_000 * 2304 * 2, 15 * 8)
    assert cut.checkpoint.nbytes - draft.checkpoint.nbytes == 8_000 * (2304 * 2 + 8) + 163840
    draft = read_draft(Checkpoint.open(tiny_speculators_eagle3(tmp_path / "draft")))
    assert with_vocabulary(draft, 8).geometry.draft_vocab_size == 8
    draft = read_draft(Checkpoint.open(tiny_deepseek_mtp(tmp_path / "mtp")))
    with pytest.raises(EstimateError, match="have no map of a cut vocabulary"):
        with_vocabulary(draft, 8)


def test_sizes_step_times_and_concurrencies() -> None:
    assert usual_sizes(163_840) == (8192, 16384, 32768, 65536)
    assert usual_sizes(65_536) == (8192, 16384, 32768)
    assert usual_sizes(16_385) == (8192, 16384)
    assert usual_sizes(16_384) == (1024, 2048, 4096, 8192)
    assert usual_sizes(9) == (1, 2, 4)
    alone = ServingSpeeds(
        machines=[], concurrencies=(), step_seconds=parse_step_times("14.2", (1, 64))
    )
    assert [alone.verify_seconds(c) for c in (1, 64)] == [pytest.approx(0.0142)] * 2
    times = parse_step_times("1=9.5,8=14", (1, 4, 8))
    some = ServingSpeeds(machines=[], concurrencies=(), step_seconds=times)
    assert [some.verify_seconds(c) for c in (1, 4, 8)] == [0.0095, None, 0.014]
    for text in ("", "x", "-1", "0", "nan", "inf", "1=2,3", "1=2,1=3", "a=2"):
        with pytest.raises(EstimateError):
            parse_step_times(text, (1,))
    with pytest.raises(EstimateError, match="a time at concurrency 12, but --concurrency is 1,8"):
        parse_step_times("1=9,12=20", (1, 8))
    assert checked_concurrencies([8, 1, 8]) == (1, 8)
    with pytest.raises(EstimateError, match="--concurrency: expected at least 1, got 0"):
        checked_concurrencies([1, 0])
