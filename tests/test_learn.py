"""Learned codes of tiny drafts of every family: they change, the loss falls, the best are kept."""

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import draftquant.calibration.rounding.learn as learning_module
import pytest
import torch
from draftquant.calibration.linear_inputs.plan_inputs import measured_inputs, served_rounding
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.rounding.latents import Latent
from draftquant.calibration.rounding.learn import (
    Learning,
    first_latents,
    latent_norms,
    learned_codes,
    nearest_weights,
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
from draftquant.quantize.planning.quantization_plan import NOTHING_MEASURED, MeasuredInputs, Plan
from draftquant.quantize.verify import verify
from draftquant.recipes import Recipe, load_recipe
from draftquant.recipes.errors import BackendError, CalibrationError, OutputError
from draftquant.scripts.cli import main
from mixes import DOWN, FP8, INT4_CHANNEL, mixed
from rounding_pairs import RoundingPair, learned_recipe, scale_tensors, shared_pair
from said_traces import write_said
from tiny import tiny_eagle3_llama

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = LearningSettings(steps=4, sequences=2, validate_every=2, warmup_steps=2)

FAMILIES = pytest.mark.parametrize(
    ("family", "recipe"),
    [("llama", "int4-channel"), pytest.param("dflash", "blackwell-nvfp4", marks=pytest.mark.slow)],
)


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
    on_progress: Callable[[LearningProgress], None] = lambda _progress: None,
    use: Callable[[LearnedCodes], None] = lambda _found: None,
) -> dict[str, bytes]:
    """Learn, quantize with what was found, and return the bytes of the folder's weights."""
    static = pair.static(plan)
    run = DraftRun(pair.loaded(), traces or pair.traces, pair.num_draft_tokens)
    how: Any = {"settings": settings, "save_seconds": 0.0, "on_progress": on_progress}
    with learned_codes(plan, run, out, static=static, **how) as found:
        use(found)
        quantized(pair, plan, out, found, static)
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


def quantized(
    pair: RoundingPair,
    plan: Plan,
    out: Path,
    found: FoundCodes | None,
    static: MeasuredInputs = NOTHING_MEASURED,
) -> None:
    source = resolve_draft(str(pair.draft_folder))
    measured = dataclasses.replace(static, found=found)
    quantize_draft(plan, out, source=source, measured=measured)


def total_divergence(pair: RoundingPair, learning: Learning) -> float:
    """The loss of the codes as they stand, over every row of every prompt that is learned from."""
    served = {n: w.detach().requires_grad_() for n, w in learning.served().items()}
    total = 0.0
    for one in learning.split.learned:
        rows = whole_rows(one.num_tokens, pair.num_draft_tokens, first_row=one.prompt_length - 1)
        loss = backward_of_divergence(
            learning.forward(served),
            learning.reference,
            SequenceReader(learning.draft, pair.traces).read([one], [rows]),
            num_draft_tokens=pair.num_draft_tokens,
            settings=LearningSettings(depth_decay=0.8, missed_weight=0.1),
            share=1.0,
        )
        total += float(loss)
    return total


@pytest.mark.parametrize("family", ["llama", "dflash"])
def test_a_row_of_a_block_takes_as_many_slots(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a step of a block draft needs the memory of as many rows as a chain's."""
    pair, asked = shared_pair(family), list[int]()

    def rows(entry: TraceEntry, num_draft_tokens: int, per_row: int) -> range:
        asked.append(per_row)
        return validation_rows(entry, num_draft_tokens, per_row)

    monkeypatch.setattr(learning_module, "validation_rows", rows)
    plan = pair.plan(learned_recipe("int4-channel"))
    learning_of(pair, plan, first_latents(plan, pair.loaded()), FEW, tmp_path).validated(0)
    block = pair.loaded().geometry.block_size
    assert set(asked) == {1 if block is None else 1 + pair.num_draft_tokens}


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
        others={},
    )


@FAMILIES
def test_the_loss_falls_and_every_linear_learns(family: str, recipe: str, tmp_path: Path) -> None:
    pair = shared_pair(family)
    plan = pair.plan(learned_recipe(recipe, norms="learned"))
    latents, norms = first_latents(plan, pair.loaded()), latent_norms(plan, pair.loaded())
    first = {module: one.quantized().codes for module, one in latents.items()}
    settings = LearningSettings(
        steps=20, sequences=2, validate_every=20, warmup_steps=2, learning_rate=0.03
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


@FAMILIES
def test_the_folder_holds_what_was_judged(family: str, recipe: str, tmp_path: Path) -> None:
    """And inputs of which one half is sixteen times smaller are balanced before."""
    pair = shared_pair(family)
    if family == "llama":
        pair = RoundingPair(Path(shutil.copytree(pair.folder, tmp_path / "pair")), family)
        qkv = {f"midlayer.self_attn.{name}_proj.weight": 1 / 16 for name in "qkv"}
        scale_tensors(pair.draft_folder, qkv, columns=slice(64))
        scale_tensors(pair.draft_folder, {"midlayer.input_layernorm.weight": 16.0})
    plan = pair.plan(learned_recipe(recipe, norms="learned"))
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
    assert len(provenance.balanced) == (family == "llama")
    # What the loop found of these codes is what the folder gives, inputs rounded as it declares.
    split = split_prompts(pair.traces, pair.num_draft_tokens, share=0.2, seed=0)
    reader = SequenceReader(loaded, pair.traces)
    k, both = pair.num_draft_tokens, (loaded.forward, pair.loaded().forward)
    read = [reader.read([one], [validation_rows(one, k, 1)]) for one in split.held_back]
    found = [agreement(*both, one, num_draft_tokens=k)[0] for one in read]
    rows = sum(one.rows for one in found)
    assert provenance.learned.acceptance_length == 1 + sum(one.accepted for one in found) / rows
    overlap = sum(one.overlap for one in found) / rows / pair.num_draft_tokens
    assert provenance.learned.overlap == pytest.approx(overlap, rel=1e-6)


class Interrupted(Exception):  # noqa: N818
    """A run that is cut short."""


def test_a_run_that_was_cut_short_ends_as_a_whole_one(llama: RoundingPair, tmp_path: Path) -> None:
    """In a step, or when learning is over; equal runs give equal bytes, however prompts stand."""
    plan = llama.plan(learned_recipe("int4-channel", norms="learned"))
    whole, out = learn(llama, plan, tmp_path / "whole"), tmp_path / "out"
    steps: list[int] = []

    def stop(progress: LearningProgress) -> None:
        if progress.step == 3:
            raise Interrupted

    def fail(_found: LearnedCodes) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        learn(llama, plan, out, on_progress=stop)
    assert (tmp_path / "out.rounding").exists()
    assert not out.exists()
    other, run = MeasuredInputs(input_scales={"fc": 2.0}), DraftRun(llama.loaded(), llama.traces, 3)
    with (
        pytest.raises(OutputError, match="with other settings") as caught,
        learned_codes(plan, run, out, static=other, settings=FEW, save_seconds=0.0),
    ):
        pass
    assert [line.split(":")[0].strip() for line in caught.value.details] == ["input_scales"]
    with pytest.raises(Interrupted):
        learn(llama, plan, out, on_progress=lambda p: steps.append(p.step), use=fail)
    assert steps[0] == 3  # after the last one that was kept
    steps.clear()
    assert learn(llama, plan, out, on_progress=lambda p: steps.append(p.step)) == whole
    assert steps == []  # learning was over
    assert not (tmp_path / "out.rounding").exists()
    reversed_ = copy_traces([llama.traces], tmp_path / "reversed", list(llama.traces)[::-1])
    assert learn(llama, plan, tmp_path / "three", traces=reversed_) == whole
    assert learn(llama, plan, tmp_path / "four", dataclasses.replace(FEW, seed=1)) != whole


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
    run = DraftRun(llama.loaded(), llama.traces.only(learned), 3)
    (tmp_path / "spool").mkdir()
    inputs = measured_inputs(by_gptq, run, spool=tmp_path / "spool", static=llama.static(plan))
    source = resolve_draft(str(llama.draft_folder))
    quantize_draft(by_gptq, tmp_path / "gptq", source=source, measured=inputs)
    found, wanted = (llama.loaded(tmp_path / out).weights for out in ("out", "gptq"))
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def edited(name: str, **changes: Any) -> Recipe:
    return dataclasses.replace(learned_recipe(name), **changes)


TWO_STAGES = dataclasses.replace(load_recipe("int4-channel").weights, first_stage="fp8_e4m3")
REFUSED = (
    (learned_recipe("fp8-ptpc"), 3),
    (edited("mi325x-w4a8", weights=TWO_STAGES), 3),
    (edited("mi325x-w4a8", backend="quark"), 3),
    (load_recipe("int4-channel"), 3),
    (learned_recipe("int4-channel"), 0),
    (learned_recipe("blackwell-nvfp4"), 3),
    (learned_recipe("int4-channel"), 40),
)


def test_what_cannot_be_learned_is_refused_before(llama: RoundingPair, tmp_path: Path) -> None:
    for recipe, k in REFUSED:
        run = DraftRun(llama.loaded(), llama.traces, k)
        with (
            pytest.raises((BackendError, CalibrationError)),
            learned_codes(llama.plan(recipe), run, tmp_path / "out"),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


def test_of_several_formats_each_linear_has_its_own(llama: RoundingPair, tmp_path: Path) -> None:
    """Four bits are learned, FP8 beside them is nearest, and inputs are rounded where asked."""
    algorithm = learned_recipe("int4-channel").algorithm
    recipe = dataclasses.replace(mixed(INT4_CHANNEL, (FP8, DOWN)), algorithm=algorithm)
    plan, draft = llama.plan(recipe), llama.loaded()
    rounding = served_rounding(plan, NOTHING_MEASURED, torch.device("cpu"))
    x = torch.linspace(-1, 1, 64).reshape(1, 64)
    for step in plan.quantized:
        name = step.row.canonical.removesuffix(".weight")
        assert torch.equal(rounding(name, x), x) != name.endswith("down_proj"), name
    latents, others = first_latents(plan, draft), nearest_weights(plan, draft)
    assert {*others} == {"layers.0.mlp.down_proj.weight"}
    assert len(latents) == 6
    learn(llama, plan, tmp_path / "out")
    report = verify(tmp_path / "out", llama.draft_folder)
    assert report.ok, report.faults
    stored = llama.loaded(tmp_path / "out").weights
    assert all(torch.equal(stored[name], weight) for name, weight in others.items())


def test_the_command_line_learns_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so few steps no code has changed: the first ones are kept on every machine."""
    monkeypatch.setitem(LearningSettings.__init__.__kwdefaults__, "steps", 10)  # type: ignore[index]
    draft, traces = tiny_eagle3_llama(tmp_path / "draft"), tmp_path / "traces"
    write_said(traces, prompts=4, tokens=9)
    how = f"--recipe blackwell-nvfp4 --algorithm learned --kv-cache measured --traces {traces} -k 1"
    assert main(["quantize", f"{draft}", *how.split(), "--out", f"{tmp_path / 'out'}"]) == 0
