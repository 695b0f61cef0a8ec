"""Mixtures of formats: their recipes, the greedy search over them, and which one is chosen."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml
from draftquant.quantize.checks import check_backends
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.quantization_plan import make_plan
from draftquant.quantize.stored.loading import LoadedDraft
from draftquant.recipes import Recipe, load_recipe, to_mapping
from draftquant.validate.counting.paired_change import PairedChange
from draftquant.validate.errors import TuneError
from draftquant.validate.tuning import candidates as module
from draftquant.validate.tuning.candidates import Candidates, Serving
from draftquant.validate.tuning.draft_mixture import (
    KEPT,
    Mixture,
    Option,
    Unit,
    described,
    options_of,
    recipe_of,
    units_of,
)
from draftquant.validate.tuning.measured_mixtures import Measured, Point, marked
from draftquant.validate.tuning.search import (
    Costs,
    UnitCost,
    greedy_path,
    narrowed_mixtures,
    uniform_mixtures,
)
from draftquant.validate.tuning.tune_draft import Wanted
from draftquant.validate.tuning.tune_draft import _doubt as doubt
from draftquant.validate.tuning.tune_draft import _narrowed as narrowed
from handmade_replays import replay
from typing_extensions import override

PAIRS = Path(__file__).parent / "pairs"
A, B = Unit(leaves=("q_proj", "k_proj", "v_proj")), Unit(leaves=("down_proj",))


def stored(name: str) -> Recipe:
    """A shipped recipe in the layout that mixes formats."""
    return dataclasses.replace(load_recipe(name), backend="torch", layout="compressed-tensors")


NVFP4, FP8, INT4, KEEP = options_of(
    [stored("blackwell-nvfp4"), stored("fp8-ptpc"), stored("int4-channel"), stored("int4-channel")]
)


def test_options_are_formats_once_each_and_what_is_kept() -> None:
    assert [str(o) for o in (NVFP4, FP8, INT4, KEEP)] == [
        "blackwell-nvfp4", "fp8-ptpc", "int4-channel", KEPT,
    ]  # fmt: skip
    again = options_of([stored("int4-channel"), stored("int4-channel-gptq")])
    assert [str(option) for option in again] == ["int4-channel", KEPT]


@pytest.mark.parametrize(
    ("pair", "units"),
    [
        ("eagle3-llama", ["q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj"]),
        ("dflash", ["q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj"]),
        (
            "eagle3-mla",
            ["q_a_proj+kv_a_proj_with_mqa", "q_b_proj", "o_proj", "gate_proj+up_proj", "down_proj"],
        ),
    ],
)
def test_units_are_what_engines_fuse_in_all_layers(pair: str, units: list[str]) -> None:
    draft = read_draft(Checkpoint.open(PAIRS / pair / "draft"))
    assert [str(u) for u in units_of(make_plan(stored("int4-channel"), draft))] == units


def test_the_recipe_of_a_mixture_makes_exactly_that(tmp_path: Path) -> None:
    """Most linears have the recipe's own format; a file of it says the same."""
    draft = read_draft(Checkpoint.open(PAIRS / "eagle3-llama" / "draft"))
    units = units_of(make_plan(stored("int4-channel"), draft))
    mixture: Mixture = dict(zip(units, (NVFP4, KEEP, NVFP4, FP8), strict=True))
    recipe = recipe_of(stored("blackwell-nvfp4"), mixture, "tuned")
    assert recipe.weights.dtype == "nvfp4"
    assert recipe.expect.quantized_per_layer == 6
    path = tmp_path / "tuned.yaml"
    path.write_text(yaml.safe_dump(to_mapping(recipe), sort_keys=False), encoding="utf-8")
    assert load_recipe(str(path)) == recipe
    plan = make_plan(recipe, draft)
    steps = {step.row.canonical.split(".")[-2]: step for step in plan.quantized}
    assert "o_proj" not in steps
    dtypes = {leaf: {t.dtype for t in steps[leaf].stored} for leaf in ("q_proj", "down_proj")}
    assert "U8" in dtypes["q_proj"]
    assert "U8" not in dtypes["down_proj"]
    assert described(mixture) == (
        "blackwell-nvfp4: q_proj+k_proj+v_proj, gate_proj+up_proj;"
        " kept: o_proj; fp8-ptpc: down_proj"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted(Candidates):
    """Makes nothing, and knows what is loaded at a time."""

    now: list[str] = dataclasses.field(default_factory=list)
    together: list[list[str]] = dataclasses.field(default_factory=list)

    @contextmanager
    @override
    def loaded(self, mixture: Mixture) -> Iterator[LoadedDraft]:
        name = described(mixture)
        self.now.append(name)
        fake = SimpleNamespace(name=name, rounds_alone="all" not in name)
        yield cast("LoadedDraft", fake)
        self.now.remove(name)


def test_drafts_are_measured_in_groups_that_fit_beside_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = read_draft(Checkpoint.open(PAIRS / "eagle3-llama" / "draft"))
    units = units_of(make_plan(stored("int4-channel"), draft))
    candidates = Counted(
        draft=draft,
        source=cast("DraftSource", None),
        reference=cast("LoadedDraft", None),
        base=stored("int4-channel"),
        serving=Serving(engine="vllm", arch="b200"),
        calibration=None,
        num_draft_tokens=3,
    )
    single = [{unit: INT4 if unit is one else KEEP for unit in units} for one in units]
    mixtures = [*single, dict.fromkeys(units, INT4), *single, dict.fromkeys(units, FP8)]
    named = {f"{i} {described(mixture)}": mixture for i, mixture in enumerate(mixtures)}
    told: list[str] = []

    def names(drafts: Sequence[LoadedDraft]) -> list[str]:
        assert len({one.rounds_alone for one in drafts}) == 1
        assert {one.name for one in drafts} <= set(candidates.now)
        candidates.together.append(list(candidates.now))
        return [one.name for one in drafts]

    assert candidates.measured(named, names, told.append) == [described(one) for one in mixtures]
    assert told == list(named)
    assert not candidates.now
    assert [len(group) for group in candidates.together] == [8, 8, 2, 2]
    least = sum(row.tensor.nbytes for row in draft.rows)
    monkeypatch.setattr(module, "MOST_TOGETHER", 1000)
    candidates.together.clear()
    many = {f"{i}": dict.fromkeys(units, FP8) for i in range(20)}
    candidates.measured(many, names, told.append)
    own = sum(step.bytes_after for step in candidates.plan(many["0"]).quantized)
    assert [len(group) for group in candidates.together][:-1] == [least // own] * (
        20 // (least // own)
    )


def test_gptq_is_the_algorithm_of_what_it_rounds_and_fp8_beside_it_is_rounded_to_nearest() -> None:
    draft = read_draft(Checkpoint.open(PAIRS / "eagle3-llama" / "draft"))
    units = units_of(make_plan(stored("int4-channel"), draft))
    base = stored("int4-channel-gptq")
    most_in_fp8: Mixture = dict(zip(units, (FP8, INT4, FP8, FP8), strict=True))
    recipe = recipe_of(base, most_in_fp8, "tuned")
    assert (recipe.weights.dtype, recipe.algorithm.rounding) == ("int4", "gptq")
    check_backends(recipe)
    all_fp8 = recipe_of(base, dict.fromkeys(units, FP8), "tuned")
    assert (all_fp8.algorithm.scale, all_fp8.algorithm.rounding) == ("absmax", "nearest")
    check_backends(all_fp8)


def test_a_base_that_names_tensors_is_refused() -> None:
    base = stored("int4-channel")
    rule = dataclasses.replace(base.rules[0], role=(), tensor=("*.o_proj.weight",))
    base = dataclasses.replace(base, rules=(rule, *base.rules))
    with pytest.raises(TuneError, match="rules for single tensors"):
        recipe_of(base, {A: INT4}, "tuned")


def costs(**by_unit: dict[Option, tuple[int, float]]) -> Costs:
    units = {"a": A, "b": B}
    return {
        units[name]: {o: UnitCost(nbytes=n, divergence=d) for o, (n, d) in each.items()}
        for name, each in by_unit.items()
    }


COSTS = costs(
    a={NVFP4: (10, 0.04), FP8: (20, 0.01), KEEP: (40, 0.0)},
    b={NVFP4: (10, 0.09), FP8: (20, 0.02), KEEP: (40, 0.0)},
)


def path(found: Costs, refused: tuple[tuple[Option, Option], ...] = ()) -> list[tuple[str, str]]:
    every = greedy_path(found, lambda m: (m[A], m[B]) not in refused)
    return [(str(m[A]), str(m[B])) for m in every]


def test_each_step_is_the_widening_that_is_worth_most_per_byte() -> None:
    n, f, k = str(NVFP4), str(FP8), KEPT
    assert path(COSTS) == [(n, n), (n, f), (f, f), (f, k), (k, k)]


def test_what_is_refused_is_passed_over() -> None:
    n, f, k = str(NVFP4), str(FP8), KEPT
    assert path(COSTS, ((NVFP4, FP8), (FP8, KEEP))) == [(n, n), (f, f), (k, k)]


def test_of_equal_sizes_the_better_one_is_begun_with_and_no_worse_one_is_taken() -> None:
    found = costs(
        a={INT4: (10, 0.03), NVFP4: (10, 0.05), FP8: (20, 0.04), KEEP: (40, 0.0)},
        b={KEEP: (40, 0.0)},
    )
    assert path(found) == [(str(INT4), KEPT), (KEPT, KEPT)]


def test_every_option_is_tried_everywhere_but_where_a_unit_cannot_have_it() -> None:
    n, f, k = str(NVFP4), str(FP8), KEPT
    found = [(str(m[A]), str(m[B])) for m in uniform_mixtures(COSTS)]
    assert found == [(n, n), (f, f), (k, k)]
    some = costs(a={FP8: (20, 0.01), KEEP: (40, 0.0)}, b={NVFP4: (10, 0.1), KEEP: (40, 0.0)})
    assert [(str(m[A]), str(m[B])) for m in uniform_mixtures(some)] == [(f, k), (k, k), (k, n)]


def test_each_unit_is_narrowed_by_the_next_option_that_is_allowed() -> None:
    n, f, k = str(NVFP4), str(FP8), KEPT
    for refused, found in (((), [(f, f), (k, n)]), (((FP8, FP8),), [(n, f), (k, n)])):
        narrower = narrowed_mixtures(
            COSTS, {A: KEEP, B: FP8}, lambda m, refused=refused: (m[A], m[B]) not in refused
        )
        assert [(str(m[A]), str(m[B])) for m in narrower] == found
    assert (n, k) not in [(str(m[A]), str(m[B])) for m in greedy_path(COSTS, lambda _m: True)]


class Answers:
    """Stands in for `Measured`: every mixture loads, and loses what it is said to."""

    def __init__(self, drops: dict[tuple[Option, Option], float]) -> None:
        self._drops, self._points = drops, dict[tuple[Option, Option], Point]()

    @property
    def points(self) -> list[Point]:
        return marked(list(self._points.values()))

    def allowed(self, _mixture: Mixture) -> bool:
        return True

    def add(self, mixtures: Iterable[Mixture]) -> None:
        for mixture in mixtures:
            both = mixture[A], mixture[B]
            nbytes = sum(COSTS[unit][option].nbytes for unit, option in mixture.items())
            drop = self._drops.get(both, 0.02)
            self._points.setdefault(
                both, dataclasses.replace(point(nbytes, 1 - drop, drop), mixture=mixture)
            )


def test_what_the_path_widened_in_vain_is_narrowed_again() -> None:
    """A was widened before B was: with B in FP8 it can be narrow again, and then nothing can."""
    answers = Answers({(KEEP, FP8): 0.008, (FP8, FP8): 0.004, (NVFP4, FP8): 0.009})
    answers.add([{A: KEEP, B: FP8}])
    points, chosen = narrowed(cast(Measured, answers), COSTS, Wanted(max_drop=0.01))
    assert chosen is not None
    assert dict(chosen.mixture) == {A: NVFP4, B: FP8}
    assert any(chosen is each for each in points)
    smaller = [each for each in points if each.nbytes < chosen.nbytes]
    assert [each.largest_drop for each in smaller] == [pytest.approx(0.02)]
    # Within a budget the narrower ones are no better: nothing more is measured.
    again = Answers({})
    again.add([{A: KEEP, B: FP8}])
    points, chosen = narrowed(cast(Measured, again), COSTS, Wanted(budget=60))
    assert points == [chosen]


def test_of_equal_bytes_only_the_better_one_is_best() -> None:
    worse, better, beaten = point(10, 0.95, 0.0), point(10, 0.97, 0.0), point(20, 0.96, 0.0)
    found = marked([beaten, worse, better])
    assert [(one.nbytes, one.overlap, one.best) for one in found] == [
        (10, 0.97, True), (10, 0.95, False), (20, 0.96, False),
    ]  # fmt: skip


def point(nbytes: int, overlap: float, drop: float) -> Point:
    change = PairedChange(
        log_ratio=math.log1p(-drop / 2),
        standard_deviation=0.1,
        standard_error=0.01,
        lower=math.log1p(-drop),
        upper=0.0,
        confidence=0.95,
        num_prompts=48,
        effective_num_prompts=40.0,
    )
    return Point(mixture={}, nbytes=nbytes, overlap=overlap, acceptance_length=2.8, change=change)


def test_the_smallest_that_is_shown_to_lose_little_or_the_best_that_fits_is_chosen() -> None:
    points = [point(10, 0.95, 0.03), point(20, 0.97, 0.009), point(30, 0.99, 0.002)]
    assert Wanted(max_drop=0.01).choice(points) is points[1]
    assert Wanted(max_drop=0.005).choice(points) is points[2]
    assert Wanted(max_drop=0.001).choice(points) is None
    assert Wanted(budget=29).choice(points) is points[1]
    assert Wanted(budget=30).choice(points) is points[2]
    assert Wanted(budget=9).choice(points) is None
    assert points[1].largest_drop == pytest.approx(0.009)
    equal = [point(10, 0.95, 0.009), point(10, 0.97, 0.009), point(20, 0.97, 0.009)]
    assert Wanted(max_drop=0.01).choice(equal) is equal[1]
    assert Wanted(budget=20).choice(equal) is equal[1]


@pytest.mark.parametrize(("accepted", "doubted"), [(3, False), (1, True)])
def test_a_draft_that_accepts_too_little_is_doubted(accepted: int, doubted: bool) -> None:
    """K = 3: every round accepts as many tokens; 2.02 is the least of a working draft."""
    rounds = [0, 0, 0, 0]
    rounds[accepted] = 12
    said = doubt(replay([tuple(rounds)] * 4))
    assert (said is not None) == doubted
    if doubted:
        assert said == (
            "the unquantized draft has an acceptance length of 2.00, a working one at least 2.02:"
            " check that the traces are of its own target"
        )
