"""Learned codes of tiny drafts of every family: they change, the loss falls, the best are kept."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import draftquant.calibration.rounding.learn as learning_module
import pytest
import torch
from draftquant.calibration import quantizing
from draftquant.calibration.linear_inputs.plan_inputs import measured_inputs, served_rounding
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.rounding.latents import Latent
from draftquant.calibration.rounding.learn import (
    Learning,
    first_latents,
    latent_norms,
    learned_codes,
)
from draftquant.calibration.rounding.learned_state import (
    KeptRounding,
    LearnedCodes,
    LearningProgress,
    LearningSettings,
)
from draftquant.calibration.rounding.proposal_divergence import agreement, backward_of_divergence
from draftquant.calibration.rounding.sequences import SequenceReader, split_prompts, validation_rows
from draftquant.calibration.traces.sets import copy_traces
from draftquant.calibration.traces.trace_folder import TraceEntry, TraceFolder
from draftquant.quantize.algorithms import FoundCodes
from draftquant.quantize.drafts.forward import whole_rows
from draftquant.quantize.files.hub import resolve_draft
from draftquant.quantize.files.provenance import QuantizedProvenance
from draftquant.quantize.files.provenance_file import read_provenance
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import NOTHING_MEASURED, Measured, Plan
from draftquant.quantize.verify import verify
from draftquant.recipes import Recipe, load_recipe
from draftquant.recipes.errors import BackendError, CalibrationError
from draftquant.scripts.cli import main
from rounding_pairs import RoundingPair, learned_recipe, scale_tensors, shared_pair

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = LearningSettings(steps=4, sequences=2, validate_every=2, warmup_steps=2)
FIRST = LearningSettings(steps=1, sequences=1)
RECIPES = {"int4": "int4-channel", "w4a8": "mi325x-w4a8", "nvfp4": "blackwell-nvfp4"}


@pytest.fixture(scope="module", params=["llama", "dflash"])
def pair(request: pytest.FixtureRequest) -> RoundingPair:
    return shared_pair(request.param)


@pytest.fixture(scope="module")
def llama() -> RoundingPair:
    return shared_pair("llama")


def learn(
    pair: RoundingPair,
    plan: Plan,
    out: Path,
    settings: LearningSettings = FEW,
    *,
    traces: TraceFolder | None = None,
    save_seconds: float = 0.0,
    on_progress: Callable[[LearningProgress], None] = lambda _progress: None,
    use: Callable[[LearnedCodes], None] = lambda _found: None,
) -> dict[str, bytes]:
    """Learn, quantize with what was found, and return the bytes of the folder's weights."""
    static = pair.static(plan)
    with learned_codes(
        plan,
        DraftRun(pair.loaded(), traces or pair.traces, pair.num_draft_tokens),
        out,
        static=static,
        settings=settings,
        save_seconds=save_seconds,
        on_progress=on_progress,
    ) as found:
        use(found)
        quantized(pair, plan, out, found, static)
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


def quantized(
    pair: RoundingPair,
    plan: Plan,
    out: Path,
    found: FoundCodes | None,
    static: Measured = NOTHING_MEASURED,
) -> None:
    quantize_draft(
        plan,
        out,
        source=resolve_draft(str(pair.draft_folder)),
        measured=dataclasses.replace(static, found=found),
    )


def total_divergence(pair: RoundingPair, learning: Learning) -> float:
    """The loss of the codes as they stand, over every row of every prompt that is learned from."""
    served = {n: w.detach().requires_grad_() for n, w in learning.served().items()}
    total = 0.0
    for entry in learning.split.learned:
        rows = whole_rows(
            entry.num_tokens, pair.num_draft_tokens, first_row=entry.prompt_length - 1
        )
        loss = backward_of_divergence(
            learning.forward(served),
            learning.reference,
            SequenceReader(learning.draft, pair.traces).read([entry], [rows]),
            num_draft_tokens=pair.num_draft_tokens,
            settings=LearningSettings(depth_decay=0.8, missed_weight=0.1),
            share=1.0,
        )
        total += float(loss)
    return total


def learning_of(
    pair: RoundingPair,
    plan: Plan,
    latents: Mapping[str, Latent],
    settings: LearningSettings,
    folder: Path,
) -> Learning:
    return Learning(
        DraftRun(pair.loaded(), pair.traces, pair.num_draft_tokens),
        latents,
        served_rounding(plan, pair.static(plan), torch.device("cpu")),
        split_prompts(pair.traces, pair.num_draft_tokens, share=0.2, seed=0),
        settings=settings,
        kept=KeptRounding(folder),
    )


def test_a_row_of_a_block_takes_as_many_slots(
    pair: RoundingPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a step of a block draft needs the memory of as many rows as a chain's."""
    plan, asked = pair.plan(learned_recipe("int4-channel")), []

    def rows(entry: TraceEntry, num_draft_tokens: int, per_row: int) -> range:
        asked.append(per_row)
        return validation_rows(entry, num_draft_tokens, per_row)

    monkeypatch.setattr(learning_module, "validation_rows", rows)
    learning_of(pair, plan, first_latents(plan, pair.loaded()), FEW, tmp_path).validated(0)
    block = pair.loaded().geometry.block_size
    assert set(asked) == {1 if block is None else 1 + pair.num_draft_tokens}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", RECIPES.values(), ids=RECIPES)
def test_the_loss_falls_and_every_linear_learns(
    name: str, pair: RoundingPair, tmp_path: Path
) -> None:
    plan = pair.plan(learned_recipe(name, norms="learned"))
    latents = first_latents(plan, pair.loaded())
    norms = latent_norms(plan, pair.loaded())
    first = {module: one.quantized().codes for module, one in latents.items()}
    settings = LearningSettings(
        steps=25, sequences=4, validate_every=25, warmup_steps=2, learning_rate=0.03
    )
    learning = learning_of(pair, plan, {**latents, **norms}, settings, tmp_path)
    before = total_divergence(pair, learning)
    learning.run((), save_seconds=0.0, on_progress=lambda _progress: None)
    # By how much hangs on near ties of rounding, and so on the CPU: 0.82 was seen without AVX.
    assert total_divergence(pair, learning) < 0.9 * before
    for module, one in latents.items():
        assert (one.quantized().codes != first[module]).any(), module
    assert norms
    for module, norm in norms.items():
        assert norm.codes.any(), module  # by less than BF16 tells, here


@pytest.mark.some(1)
@pytest.mark.parametrize("name", RECIPES.values(), ids=RECIPES)
def test_the_folder_holds_what_was_judged(name: str, pair: RoundingPair, tmp_path: Path) -> None:
    plan = pair.plan(learned_recipe(name, norms="learned"))
    served: dict[str, torch.Tensor] = {}

    def note(found: LearnedCodes) -> None:
        served.update({n: found.quantized(n).dequantized() for n in pair.loaded().linears})
        norms = (step.row.canonical.removesuffix(".weight") for step in plan.learned_norms)
        served.update({n: found.weight(n).float() for n in norms})

    learn(pair, plan, tmp_path / "out", use=note)
    loaded = pair.loaded(tmp_path / "out")
    for module, weight in served.items():
        assert torch.equal(loaded.weights[f"{module}.weight"], weight), module
    report = verify(tmp_path / "out", pair.draft_folder)
    assert report.ok, report.faults
    provenance = read_provenance(tmp_path / "out")
    assert isinstance(provenance, QuantizedProvenance)
    assert provenance.learned is not None
    # What the loop found of these codes is what the folder gives, inputs rounded as it declares.
    split = split_prompts(pair.traces, pair.num_draft_tokens, share=0.2, seed=0)
    reader = SequenceReader(loaded, pair.traces)
    found = [
        agreement(
            loaded.forward,
            pair.loaded().forward,
            reader.read([entry], [validation_rows(entry, pair.num_draft_tokens, 1)]),
            num_draft_tokens=pair.num_draft_tokens,
        )[0]
        for entry in split.held_back
    ]
    rows = sum(one.rows for one in found)
    assert provenance.learned.acceptance_length == 1 + sum(one.accepted for one in found) / rows
    overlap = sum(one.overlap for one in found) / rows / pair.num_draft_tokens
    assert provenance.learned.overlap == pytest.approx(overlap, rel=1e-6)


def test_codes_are_of_the_balanced_weights(llama: RoundingPair, tmp_path: Path) -> None:
    """The embedding's half sixteen times smaller, its norm as much larger: the same draft."""
    shutil.copytree(llama.folder, tmp_path / "pair")
    skewed = RoundingPair(tmp_path / "pair", "llama")
    prefix = "midlayer.self_attn."
    qkv = {f"{prefix}{name}_proj.weight": 1 / 16 for name in "qkv"}
    scale_tensors(skewed.draft_folder, qkv, columns=slice(64))
    scale_tensors(skewed.draft_folder, {"midlayer.input_layernorm.weight": 16.0})
    plan = skewed.plan(learned_recipe("int4-channel", norms="learned"))
    served: dict[str, torch.Tensor] = {}

    def note(found: LearnedCodes) -> None:
        served.update({n: found.quantized(n).dequantized() for n in skewed.loaded().linears})

    learn(skewed, plan, tmp_path / "out", use=note)
    provenance = read_provenance(tmp_path / "out")
    assert isinstance(provenance, QuantizedProvenance)
    assert list(provenance.balanced) == ["midlayer.input_layernorm.weight"]
    assert verify(tmp_path / "out", skewed.draft_folder).ok
    loaded = skewed.loaded(tmp_path / "out")
    for name, weight in served.items():
        assert torch.equal(loaded.weights[f"{name}.weight"], weight), name


def test_equal_runs_give_equal_bytes_whatever_the_order_of_prompts(
    llama: RoundingPair, tmp_path: Path
) -> None:
    plan = llama.plan(learned_recipe("int4-channel"))
    one = learn(llama, plan, tmp_path / "one")
    assert one
    reversed_ = copy_traces([llama.traces], tmp_path / "reversed", list(llama.traces)[::-1])
    assert learn(llama, plan, tmp_path / "three", traces=reversed_) == one
    seeded = dataclasses.replace(FEW, seed=1)
    assert learn(llama, plan, tmp_path / "four", seeded) != one


class Interrupted(Exception):  # noqa: N818
    """A run that is cut short."""


def stop_after(step: int) -> Callable[[LearningProgress], None]:
    def look(progress: LearningProgress) -> None:
        if progress.step == step:
            raise Interrupted

    return look


@pytest.mark.some(1)
@pytest.mark.parametrize(("step", "save_seconds"), [(3, 0.0), (1, 0.0), (3, 1e9)])
def test_a_run_that_was_cut_short_ends_as_if_it_had_not_been(
    step: int, save_seconds: float, pair: RoundingPair, tmp_path: Path
) -> None:
    if (step, save_seconds) == (3, 0.0):
        recipe = learned_recipe("blackwell-nvfp4", norms="learned", input_correction="auto")
    else:
        recipe = learned_recipe("int4-channel", norms="learned")
    plan = pair.plan(recipe)
    whole = learn(pair, plan, tmp_path / "whole")
    with pytest.raises(Interrupted):
        learn(
            pair, plan, tmp_path / "out",
            save_seconds=save_seconds, on_progress=stop_after(step),
        )  # fmt: skip
    kept = tmp_path / "out.rounding"
    assert kept.exists() is (step > 1 and save_seconds == 0)
    assert not (tmp_path / "out").exists()
    steps: list[int] = []
    resumed = learn(pair, plan, tmp_path / "out", on_progress=lambda p: steps.append(p.step))
    assert steps[0] == (2 * (step // 2) + 1 if save_seconds == 0 else 1)
    assert resumed == whole
    assert not kept.exists()


def test_what_is_learned_stays_until_the_folder_is_written(
    llama: RoundingPair, tmp_path: Path
) -> None:
    plan = llama.plan(learned_recipe("int4-channel"))

    def fail(_found: LearnedCodes) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        learn(llama, plan, tmp_path / "out", use=fail)
    steps: list[int] = []
    found = learn(llama, plan, tmp_path / "out", on_progress=lambda p: steps.append(p.step))
    assert steps == []  # learning was over
    assert found == learn(llama, plan, tmp_path / "whole")


def test_patience_ends_learning_and_the_best_step_is_kept(
    llama: RoundingPair, tmp_path: Path
) -> None:
    """A learning rate that ruins everything: the first codes are the best, and are kept."""
    plan = llama.plan(learned_recipe("int4-channel"))
    ruinous = LearningSettings(
        steps=40, sequences=1, validate_every=1, patience=3, learning_rate=3.0, warmup_steps=1
    )
    steps: list[int] = []
    learn(llama, plan, tmp_path / "out", ruinous, on_progress=lambda p: steps.append(p.step))
    provenance = read_provenance(tmp_path / "out")
    assert isinstance(provenance, QuantizedProvenance)
    assert provenance.learned is not None
    assert (steps[-1], provenance.learned.kept_step) == (3, 0)
    nearest = dataclasses.replace(
        plan.recipe, algorithm=dataclasses.replace(plan.recipe.algorithm, rounding="nearest")
    )
    quantized(llama, llama.plan(nearest), tmp_path / "nearest", None)
    assert [p.read_bytes() for p in (tmp_path / "out").glob("*.safetensors")] == [
        p.read_bytes() for p in (tmp_path / "nearest").glob("*.safetensors")
    ]


def test_learning_starts_where_gptq_corrected_for_the_rounding_of_inputs_ends(
    llama: RoundingPair, tmp_path: Path
) -> None:
    """Measured on the prompts that are learned from: the others judge the start as well."""
    plan = llama.plan(learned_recipe("blackwell-nvfp4", input_correction="auto"))
    still = LearningSettings(
        steps=1, sequences=1, learning_rate=1e-9, scale_learning_rate=1e-9, patience=1
    )
    learn(llama, plan, tmp_path / "out", still)
    algorithm = dataclasses.replace(plan.recipe.algorithm, rounding="gptq")
    by_gptq = llama.plan(dataclasses.replace(plan.recipe, algorithm=algorithm))
    learned = split_prompts(llama.traces, 3, share=0.2, seed=0).learned
    (tmp_path / "spool").mkdir()
    static = llama.static(plan)
    inputs = measured_inputs(
        by_gptq,
        DraftRun(llama.loaded(), llama.traces.only(learned), 3),
        spool=tmp_path / "spool",
        static=static,
    )
    quantize_draft(
        by_gptq, tmp_path / "gptq", source=resolve_draft(str(llama.draft_folder)), measured=inputs
    )
    found, wanted = (llama.loaded(tmp_path / out).weights for out in ("out", "gptq"))
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def edited(name: str, **changes: Any) -> Recipe:
    return dataclasses.replace(learned_recipe(name), **changes)


TWO_STAGES = dataclasses.replace(load_recipe("int4-channel").weights, first_stage="fp8_e4m3")
REFUSED = {
    "rounding to 8 bits loses too little": (learned_recipe("fp8-ptpc"), 3),
    "two stages": (edited("mi325x-w4a8", weights=TWO_STAGES), 3),
    "only draftquant's own backend (torch)": (edited("mi325x-w4a8", backend="quark"), 3),
    "expected rounding: learned, got scale absmax": (load_recipe("int4-channel"), 3),
    "expected at least 1, got 0": (learned_recipe("int4-channel"), 0),
    "learning rounds the inputs under static scales": (learned_recipe("blackwell-nvfp4"), 3),
    "expected at least 4 independent prompts": (learned_recipe("int4-channel"), 40),
}


def test_what_cannot_be_learned_is_refused_before(llama: RoundingPair, tmp_path: Path) -> None:
    for what, (recipe, k) in REFUSED.items():
        run = DraftRun(llama.loaded(), llama.traces, k)
        with (
            pytest.raises((BackendError, CalibrationError)) as caught,
            learned_codes(llama.plan(recipe), run, tmp_path / "out"),
        ):
            pass
        assert what in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_codes_of_another_draft_are_refused(llama: RoundingPair, tmp_path: Path) -> None:
    """Codes of another shape."""
    plan = llama.plan(learned_recipe("int4-channel"))

    class Odd:
        def __init__(self, found: LearnedCodes) -> None:
            self.origin, self._found = found.origin, found

        def quantized(self, _module: str) -> object:
            return self._found.quantized("layers.0.mlp.down_proj")

    def use(found: LearnedCodes) -> None:
        with pytest.raises(BackendError, match=r"expected codes \[.*\], found were \[64, 48\]"):
            quantized(llama, plan, tmp_path / "odd", Odd(found))  # type: ignore[arg-type]

    learn(llama, plan, tmp_path / "out", FIRST, use=use)
    assert not (tmp_path / "odd").exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int4-channel", "blackwell-nvfp4"])
def test_the_command_quantizes_verifies_and_tells(
    recipe: str,
    llama: RoundingPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = LearningSettings(steps=4, sequences=2, validate_every=2)
    monkeypatch.setattr(quantizing, "LearningSettings", lambda: few)
    traces = ("--traces", str(llama.folder / "traces"))
    command = ["quantize", str(llama.draft_folder), "--recipe", recipe, "--algorithm", "learned"]
    assert main([*command, *traces, "--out", str(tmp_path / "a")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "step 2 of 4, loss 0.0" in said
    assert "on 2 prompts held back" in said
    assert "learned rounding from 12 prompts, of which about 20% are held back" in said
    assert ("input scales from 12 traces" in said) is (recipe == "blackwell-nvfp4")
    assert main([*command, *traces, "--out", str(tmp_path / "b")]) == 0
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    report = verify(tmp_path / "a", llama.draft_folder)
    assert report.ok, report.faults
    record = json.loads((tmp_path / "a" / "draftquant.json").read_text(encoding="utf-8"))
    assert record["recipe"]["algorithm"]["rounding"] == "learned"
    assert record["recipe"]["algorithm"]["scale"] == "mse"
    assert record["recipe"]["backend"] == "torch"
    assert len(record["calibration_prompts"]) == 12  # those that were held back too
    assert record["learned"]["steps"] == 4
