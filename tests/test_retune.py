"""Retuned drafts of tiny pairs: two folders that belong together, each whole or not there."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.calibration.errors import CalibrationError, TraceError
from draftquant.calibration.rounding import learning_run, validation
from draftquant.calibration.rounding import retune_draft as retuning
from draftquant.calibration.rounding.learning_loop import Learning
from draftquant.calibration.rounding.learning_settings import LearningSettings, Teaching
from draftquant.calibration.rounding.retune_draft import RetuneReport, Side, retune_draft
from draftquant.calibration.rounding.validation import LearningProgress
from draftquant.calibration.traces.sets import copy_traces
from draftquant.quantize.errors import BackendError, CheckpointError, OutputError
from draftquant.quantize.files import publish as publishing
from draftquant.quantize.files.hub import resolve_draft
from draftquant.quantize.files.provenance import QuantizedProvenance, TunedProvenance
from draftquant.quantize.files.provenance_file import read_provenance
from draftquant.quantize.quantization_plan import Plan
from draftquant.quantize.verify import verify
from draftquant.scripts.api.retune import retuned_recipe
from rounding_pairs import RoundingPair, make_pair
from safetensors.torch import load_file
from tiny import edit_json

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FEW = LearningSettings(
    steps=4, sequences=2, validate_every=2, warmup_steps=1, learning_rate=0.05,
    max_overlap_drop=1.0, teaching=Teaching(min_prompts=4),
)  # fmt: skip


def keep_the_last_step(patch: pytest.MonkeyPatch) -> None:
    """Tiny drafts are as good as they can be: no step of so few would be kept for what it is."""
    patch.setattr(validation, "_is_better", lambda _one, _best, *, taught: taught)


@pytest.fixture(autouse=True)
def _last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_last_step(monkeypatch)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> RoundingPair:
    return make_pair(tmp_path_factory.mktemp("retune") / "llama", "llama")


@pytest.fixture(scope="module", params=["mla", "dflash"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RoundingPair:
    return make_pair(tmp_path_factory.mktemp("retune") / request.param, request.param)


def retune(
    pair: RoundingPair, folder: Path, *, recipe: str = "int4-channel", **given: Any
) -> RetuneReport:
    """Into folder/out and folder/baseline."""
    arguments: dict[str, Any] = {
        "source": resolve_draft(str(pair.draft_folder)),
        "num_draft_tokens": pair.num_draft_tokens,
        "settings": FEW,
        "save_seconds": 0.0,
    }
    return retune_draft(
        given.pop("plan", None) or pair.plan(retuned_recipe(recipe)),
        pair.loaded(),
        given.pop("traces", pair.traces),
        given.pop("out", folder / "out"),
        given.pop("baseline", folder / "baseline"),
        **(arguments | given),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def records(folder: Path) -> tuple[QuantizedProvenance, TunedProvenance]:
    made, tuned = read_provenance(folder / "out"), read_provenance(folder / "baseline")
    assert isinstance(made, QuantizedProvenance)
    assert isinstance(tuned, TunedProvenance)
    return made, tuned


def check_both(pair: RoundingPair, folder: Path) -> None:
    """Two folders of one retuning, in which only linears learned, and which verify knows."""
    made, tuned = records(folder)
    assert made.retuning is not None
    assert dataclasses.replace(made.retuning, baseline_sha256=None) == tuned.retuning
    assert made.source == tuned.source
    assert made.calibration_prompts == tuned.calibration_prompts
    assert made.learned is not None
    for field in ("traces_sha256", "num_draft_tokens", "steps", "sequences", "seed"):
        assert getattr(made.learned, field) == getattr(tuned.learned, field), field
    before, after = tensors(pair.draft_folder), tensors(folder / "baseline")
    assert before.keys() == after.keys()
    learned = {f"{module}.weight" for module in tuned.retuning.linears}
    for name, weight in before.items():
        assert after[name].dtype == weight.dtype
        if name not in learned:
            assert torch.equal(after[name], weight), name
    assert made.learned.kept_step == tuned.learned.kept_step == 4
    assert not any(torch.equal(after[name], before[name]) for name in learned)
    for name in ("out", "baseline"):
        report = verify(folder / name, pair.draft_folder)
        assert report.ok, report.faults
        assert report.retuned
        card = (folder / name / "README.md").read_text(encoding="utf-8")
        assert card.startswith("# RETUNED\n")
    assert sorted(path.name for path in folder.iterdir()) == ["baseline", "out"]


@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["int4-channel", "mi325x-w4a8", "blackwell-nvfp4"])
def test_two_folders_that_belong_together(recipe: str, llama: RoundingPair, tmp_path: Path) -> None:
    sides: list[tuple[Side, int]] = []
    report = retune(
        llama, tmp_path, recipe=recipe, on_progress=lambda side, p: sides.append((side, p.step))
    )
    check_both(llama, tmp_path)
    assert sides == [(side, step) for side in ("baseline", "quantized") for step in range(1, 5)]
    assert not report.made_before
    made, tuned = records(tmp_path)
    assert made.recipe.algorithm.rounding == "retuned"
    assert report.learned == made.learned
    assert report.baseline_learned == tuned.learned
    assert len(made.calibration_prompts) == 12  # those that were held back too
    assert bool(made.input_scales) is (recipe == "blackwell-nvfp4")


@pytest.mark.some(1)
def test_other_families(other: RoundingPair, tmp_path: Path) -> None:
    retune(other, tmp_path)
    check_both(other, tmp_path)


def test_products_of_bf16_as_on_a_gpu(
    llama: RoundingPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not finite, or of a dtype that does not fit, shows on a CPU too."""
    monkeypatch.setattr(Learning, "_precision", lambda _self: torch.autocast("cpu", torch.bfloat16))
    retune(llama, tmp_path)
    check_both(llama, tmp_path)


def test_both_accept_what_their_records_say(
    llama: RoundingPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look at the baseline is at the draft as released; what is kept is no worse."""
    monkeypatch.undo()
    torch.set_num_threads(1)
    report = retune(llama, tmp_path)
    tuned = report.baseline_learned
    assert tuned.acceptance_length_before == tuned.acceptance_length_unquantized
    assert tuned.overlap_before == pytest.approx(1.0, abs=1e-5)
    assert tuned.acceptance_length >= tuned.acceptance_length_before
    assert report.learned.acceptance_length >= report.learned.acceptance_length_before


@pytest.mark.slow
def test_equal_runs_give_equal_bytes(llama: RoundingPair, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        retune(llama, tmp_path / name)
    reversed_ = copy_traces([llama.traces], tmp_path / "reversed", list(llama.traces)[::-1])
    (tmp_path / "three").mkdir()
    retune(llama, tmp_path / "three", traces=reversed_)
    (tmp_path / "four").mkdir()
    retune(llama, tmp_path / "four", settings=dataclasses.replace(FEW, seed=3))
    for folder in ("out", "baseline"):
        one = contents(tmp_path / "one" / folder)
        assert contents(tmp_path / "two" / folder) == one
        weights = one["model.safetensors"]
        assert contents(tmp_path / "three" / folder)["model.safetensors"] == weights
        assert contents(tmp_path / "four" / folder)["model.safetensors"] != weights


def test_the_card_of_the_source_stays_behind_the_mark(llama: RoundingPair, tmp_path: Path) -> None:
    shutil.copytree(llama.folder, tmp_path / "pair")
    carded = RoundingPair(tmp_path / "pair", "llama")
    front = "---\nlicense: mit\n---\n"
    (carded.draft_folder / "README.md").write_text(f"{front}\n# Mine\n", encoding="utf-8")
    (tmp_path / "to").mkdir()
    retune(carded, tmp_path / "to")
    for name in ("out", "baseline"):
        card = (tmp_path / "to" / name / "README.md").read_text(encoding="utf-8")
        assert card.startswith(f"{front}\n# RETUNED\n")
        assert card.endswith("\n\n# Mine\n")
        assert verify(tmp_path / "to" / name, carded.draft_folder).ok


# ---- cut short, and what exists


class Interrupted(Exception):  # noqa: N818
    """A run that is cut short."""


def stop_at(side: Side, step: int) -> Callable[[Side, LearningProgress], None]:
    def look(now: Side, progress: LearningProgress) -> None:
        if (now, progress.step) == (side, step):
            raise Interrupted

    return look


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("side", "step", "left"),
    [
        ("baseline", 1, []),
        ("baseline", 3, ["baseline.rounding"]),
        ("quantized", 1, ["baseline"]),
        ("quantized", 3, ["baseline", "out.rounding"]),
    ],
)
def test_a_run_that_was_cut_short_ends_as_if_it_had_not_been(
    side: Side, step: int, left: list[str], llama: RoundingPair, tmp_path: Path
) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    retune(llama, tmp_path / "whole")
    with pytest.raises(Interrupted):
        retune(llama, tmp_path / "cut", on_progress=stop_at(side, step))
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == left
    steps: list[tuple[Side, int]] = []
    report = retune(llama, tmp_path / "cut", on_progress=lambda now, p: steps.append((now, p.step)))
    assert steps[0] == (side, step if step == 3 else 1)
    assert report.made_before is (side == "quantized")
    check_both(llama, tmp_path / "cut")
    for folder in ("out", "baseline"):
        assert contents(tmp_path / "cut" / folder) == contents(tmp_path / "whole" / folder)


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import test_retune
from rounding_pairs import RoundingPair
def die(side, progress):
    if (side, progress.step) == ("quantized", 3):
        os.kill(os.getpid(), 9)
test_retune.torch.set_num_threads(1)
test_retune.keep_the_last_step(test_retune.pytest.MonkeyPatch())
test_retune.retune(RoundingPair(Path(sys.argv[2]), "llama"), Path(sys.argv[3]), on_progress=die)
"""


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(llama: RoundingPair, tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    retune(llama, tmp_path / "whole")
    tests = Path(__file__).parent
    run = subprocess.run(
        (sys.executable, "-c", KILLED, str(tests), str(llama.folder), str(tmp_path / "cut")),
        capture_output=True, env={**os.environ}, check=False,
    )  # fmt: skip
    assert run.returncode == -9, run.stderr.decode()
    left = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert left == ["baseline", "out.rounding"]
    retune(llama, tmp_path / "cut")
    check_both(llama, tmp_path / "cut")
    for folder in ("out", "baseline"):
        assert contents(tmp_path / "cut" / folder) == contents(tmp_path / "whole" / folder)


def test_what_a_run_left_that_was_killed_behind_the_baseline_is_removed(
    llama: RoundingPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_plan: Plan, *_arguments: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(learning_run, "shutil", SimpleNamespace(rmtree=lambda *_a, **_k: None))
        patch.setattr(retuning, "_checked_baseline", killed)
        with pytest.raises(Interrupted):
            retune(llama, tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["baseline", "baseline.rounding"]
    before = contents(tmp_path / "baseline")
    sides: set[Side] = set()
    report = retune(llama, tmp_path, on_progress=lambda side, _p: sides.add(side))
    assert report.made_before
    assert sides == {"quantized"}
    assert contents(tmp_path / "baseline") == before
    check_both(llama, tmp_path)


def test_one_baseline_serves_several_recipes_and_is_not_touched(
    llama: RoundingPair, tmp_path: Path
) -> None:
    retune(llama, tmp_path)
    before = contents(tmp_path / "baseline")
    shutil.rmtree(tmp_path / "out")
    sides: set[Side] = set()
    report = retune(
        llama, tmp_path, recipe="blackwell-nvfp4", on_progress=lambda side, _p: sides.add(side)
    )
    assert report.made_before
    assert sides == {"quantized"}
    assert contents(tmp_path / "baseline") == before
    check_both(llama, tmp_path)


def test_an_output_that_exists_is_refused_before_anything(
    llama: RoundingPair, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="out: it already exists, and is never"):
        retune(llama, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_is_no_baseline_is_refused(llama: RoundingPair, tmp_path: Path) -> None:
    (tmp_path / "baseline").mkdir()
    (tmp_path / "baseline" / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="it does not hold an unquantized draft that") as caught:
        retune(llama, tmp_path)
    assert "give another --baseline" in caught.value.fix
    shutil.rmtree(tmp_path / "baseline")
    shutil.copytree(llama.draft_folder, tmp_path / "baseline")
    with pytest.raises(OutputError, match="it does not hold an unquantized draft that was"):
        retune(llama, tmp_path)
    assert contents(tmp_path / "baseline") == contents(llama.draft_folder)
    assert [path.name for path in tmp_path.iterdir()] == ["baseline"]


def test_the_baseline_of_another_retuning_is_refused(llama: RoundingPair, tmp_path: Path) -> None:
    retune(llama, tmp_path)
    before = contents(tmp_path / "baseline")
    shutil.rmtree(tmp_path / "out")
    for settings, key in (
        (dataclasses.replace(FEW, seed=1), "seed: 0, now 1"),
        (dataclasses.replace(FEW, learning_rate=0.01), "learning_rate: 0.05, now 0.01"),
        (dataclasses.replace(FEW, depth_decay=0.5), "settings_sha256: "),
        (dataclasses.replace(FEW, teaching=Teaching(anchor=1.0, min_prompts=4)), "anchor: 10.0"),
    ):
        with pytest.raises(OutputError, match="it was fine-tuned with other settings") as caught:
            retune(llama, tmp_path, settings=settings)
        assert key in caught.value.what
    fewer = copy_traces([llama.traces], tmp_path / "fewer", list(llama.traces)[:11])
    with pytest.raises(OutputError, match="it was fine-tuned with other settings"):
        retune(llama, tmp_path, traces=fewer)
    assert contents(tmp_path / "baseline") == before
    assert not (tmp_path / "out").exists()


def test_a_damaged_baseline_is_refused(llama: RoundingPair, tmp_path: Path) -> None:
    retune(llama, tmp_path)
    shutil.rmtree(tmp_path / "out")
    path = tmp_path / "baseline" / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(OutputError, match="its files were changed: "):
        retune(llama, tmp_path)
    assert path.read_bytes() == damaged


def test_one_folder_for_both_is_refused(llama: RoundingPair, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="--out and --baseline name the same folder"):
        retune(llama, tmp_path, baseline=tmp_path / "out")
    with pytest.raises(OutputError, match="overlaps the source"):
        retune(llama, tmp_path, baseline=llama.draft_folder / "baseline")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_baseline_and_what_was_learned(
    llama: RoundingPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = publishing.write_provenance

    def full(folder: Path, provenance: Any) -> None:
        if isinstance(provenance, QuantizedProvenance):
            raise OSError(28, "No space left on device")
        plain(folder, provenance)

    monkeypatch.setattr(publishing, "write_provenance", full)
    with pytest.raises(OutputError, match="No space left"):
        retune(llama, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["baseline", "out.rounding"]
    monkeypatch.setattr(publishing, "write_provenance", plain)
    retune(llama, tmp_path)
    check_both(llama, tmp_path)


# ---- bad input


def refused(pair: RoundingPair, folder: Path, error: type[Exception], **given: Any) -> Any:
    """The error of a run that leaves nothing behind."""
    with pytest.raises(error) as caught:
        retune(pair, folder, **given)
    assert list(folder.iterdir()) == []
    return caught.value


def test_too_few_prompts(llama: RoundingPair, tmp_path: Path) -> None:
    """The default asks for 128 to learn from."""
    settings = dataclasses.replace(FEW, teaching=Teaching())
    error = refused(llama, tmp_path, CalibrationError, settings=settings)
    assert "expected at least 128 prompts to learn from, got 10, with 2 more" in error.what
    assert error.fix == "record more prompts: 160 or more"


def test_traces_of_another_target(
    llama: RoundingPair, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    block = make_pair(tmp_path_factory.mktemp("another") / "dflash", "dflash")
    error = refused(llama, tmp_path, TraceError, traces=block.traces)
    assert "its vocabulary has 96 tokens, the target's 24" in str(error)


def test_no_teacher(llama: RoundingPair, tmp_path: Path) -> None:
    settings = dataclasses.replace(FEW, teaching=None)
    error = refused(llama, tmp_path, CalibrationError, settings=settings)
    assert "expected a teacher, got none" in error.what


def test_a_block_that_the_draft_cannot_propose(llama: RoundingPair, tmp_path: Path) -> None:
    error = refused(llama, tmp_path, CalibrationError, num_draft_tokens=0)
    assert "expected at least 1, got 0" in error.what


@pytest.mark.parametrize("recipe", ["fp8-ptpc", "blackwell-fp8"])
def test_eight_bits_are_refused(recipe: str, llama: RoundingPair, tmp_path: Path) -> None:
    error = refused(llama, tmp_path, BackendError, recipe=recipe)
    assert "rounding: retuned is for formats of four bits" in error.what


def test_a_recipe_that_says_otherwise(llama: RoundingPair, tmp_path: Path) -> None:
    recipe = retuned_recipe("int4-channel")
    algorithm = dataclasses.replace(recipe.algorithm, rounding="learned")
    plan: Plan = llama.plan(dataclasses.replace(recipe, algorithm=algorithm))
    error = refused(llama, tmp_path, BackendError, plan=plan)
    assert "expected rounding: retuned, got scale mse, rounding learned" in error.what


def test_what_was_tuned_or_quantized_is_no_source(llama: RoundingPair, tmp_path: Path) -> None:
    """Neither for another retuning, nor to be quantized as if it were the draft as released."""
    shutil.copytree(llama.folder, tmp_path / "pair")
    (tmp_path / "first").mkdir()
    retune(llama, tmp_path / "first")
    shutil.rmtree(tmp_path / "pair" / "draft")
    shutil.copytree(tmp_path / "first" / "baseline", tmp_path / "pair" / "draft")
    (tmp_path / "to").mkdir()
    error = refused(RoundingPair(tmp_path / "pair", "llama"), tmp_path / "to", CheckpointError)
    assert "already the result of a quantization or a retuning" in error.what


def test_a_card_that_cannot_be_read(llama: RoundingPair, tmp_path: Path) -> None:
    shutil.copytree(llama.folder, tmp_path / "pair")
    (tmp_path / "pair" / "draft" / "README.md").write_bytes(b"\xff\xfe")
    (tmp_path / "to").mkdir()
    error = refused(RoundingPair(tmp_path / "pair", "llama"), tmp_path / "to", CheckpointError)
    assert error.where.endswith("README.md")
    assert error.what.startswith("cannot be read: ")


# ---- what verify says


@pytest.fixture(scope="module")
def made(llama: RoundingPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        keep_the_last_step(patch)
        retune(llama, folder)
    return folder


def changed(path: Path, name: str, change: Callable[[np.ndarray[Any, Any]], None]) -> None:
    """Change the bytes of a tensor in place."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:start])[name]["data_offsets"]
    view = np.frombuffer(content, np.uint8, end - begin, start + begin)
    change(view)
    path.write_bytes(content)


def flip(view: np.ndarray[Any, Any]) -> None:
    view[0] ^= 1


def shuffle(view: np.ndarray[Any, Any]) -> None:
    view[:] = np.random.default_rng(0).permutation(view.reshape(-1, 64)).reshape(-1)


def nan(view: np.ndarray[Any, Any]) -> None:
    view[:2] = 255, 127


Q = "midlayer.self_attn.q_proj"


@pytest.mark.parametrize(
    ("folder", "tensor", "change", "where"),
    [
        ("baseline", "midlayer.mlp.up_proj.weight", flip, "draftquant.json: tensor_digests."),
        ("baseline", f"{Q}.weight", shuffle, f"{Q}.weight: expected a cosine of at least 0.8"),
        ("baseline", f"{Q}.weight", nan, f"{Q}.weight: expected finite weights, got 1 other"),
        ("baseline", "norm.weight", flip, "norm.weight: expected the source's bytes"),
        ("out", f"{Q}.weight_packed", flip, "draftquant.json: tensor_digests."),
        ("out", f"{Q}.weight_packed", shuffle, "weight_packed: expected a cosine of at least 0.8"),
        ("out", f"{Q}.weight_scale", nan, "weight_scale: expected finite scales > 0"),
        ("out", "norm.weight", flip, "norm.weight: expected the source's bytes"),
    ],
)  # fmt: skip
def test_what_was_changed_is_found(
    folder: str, tensor: str, change: Callable[[np.ndarray[Any, Any]], None], where: str,
    made: Path, llama: RoundingPair, tmp_path: Path,
) -> None:  # fmt: skip
    shutil.copytree(made / folder, tmp_path / folder)
    changed(tmp_path / folder / "model.safetensors", tensor, change)
    report = verify(tmp_path / folder, llama.draft_folder)
    assert any(where in str(fault) for fault in report.faults), report.faults


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("calibration_prompts", [], "draftquant.json: sha256"),
        ("tensor_bytes", {"before": 1, "after": 1}, "draftquant.json: tensor_bytes.before"),
    ],
)
def test_an_edited_record_of_the_baseline_is_found(
    key: str, value: object, where: str, made: Path, llama: RoundingPair, tmp_path: Path
) -> None:
    shutil.copytree(made / "baseline", tmp_path / "baseline")
    edit_json(tmp_path / "baseline" / "draftquant.json", **{key: value})
    report = verify(tmp_path / "baseline", llama.draft_folder)
    assert any(fault.where.startswith(where) for fault in report.faults), report.faults


def test_a_linear_that_there_is_not_is_found(
    made: Path, llama: RoundingPair, tmp_path: Path
) -> None:
    shutil.copytree(made / "baseline", tmp_path / "baseline")
    retuning = json.loads((tmp_path / "baseline" / "draftquant.json").read_text(encoding="utf-8"))[
        "retuning"
    ]
    retuning["linears"] = [*retuning["linears"], "norm"]
    edit_json(tmp_path / "baseline" / "draftquant.json", retuning=retuning)
    report = verify(tmp_path / "baseline", llama.draft_folder)
    assert any(str(f).startswith("norm: expected no such linear") for f in report.faults)


def test_files_and_config_of_the_baseline_are_held_against_the_source(
    made: Path, llama: RoundingPair, tmp_path: Path
) -> None:
    shutil.copytree(made / "baseline", tmp_path / "baseline")
    (tmp_path / "baseline" / "more.txt").write_text("", encoding="utf-8")
    edit_json(tmp_path / "baseline" / "config.json", rms_norm_eps=0.5)
    report = verify(tmp_path / "baseline", llama.draft_folder)
    found = {fault.where for fault in report.faults}
    assert {"more.txt", "config.json: rms_norm_eps"} <= found


def test_another_source_is_found(made: Path, llama: RoundingPair, tmp_path: Path) -> None:
    shutil.copytree(llama.draft_folder, tmp_path / "draft")
    changed(tmp_path / "draft" / "model.safetensors", f"{Q}.weight", flip)
    for folder in ("baseline", "out"):
        faults = verify(made / folder, tmp_path / "draft").faults
        assert [fault.where for fault in faults] == [
            f"draftquant.json: source.tensor_digests.{Q}.weight"
        ]


def test_a_mark_that_was_taken_away_is_missed(made: Path, tmp_path: Path) -> None:
    """A record of codes that the target taught says so, or is none."""
    shutil.copytree(made / "out", tmp_path / "out")
    path = tmp_path / "out" / "draftquant.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    del record["retuning"]
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(CheckpointError, match="retuning: expected exactly where the recipe says"):
        read_provenance(tmp_path / "out")
