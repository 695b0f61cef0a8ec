"""GPTQ, and weights that make up for the rounding of their inputs: against their definitions."""

import contextlib
import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant import api as dq
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.algorithms.algorithm import MOST_CHANGED
from draftquant.quantize.backends import get_backend
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.dequantize_draft import dequantize_draft
from draftquant.quantize.making.transcode_draft import plan_transcoding
from draftquant.quantize.numerics.quantized_weight import code_values
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.quantize.verify.audit import audit_checkpoint
from draftquant.recipes import Algorithm, load_recipe, recipe_sha256
from draftquant.recipes.chosen_recipe import RecipeChoice, chosen_recipe
from draftquant.recipes.errors import BackendError, LayoutError, RecipeError
from draftquant.recipes.schema import ScaleChoice
from draftquant.scripts.cli import main
from gptq_textbook import gaussian, inputs, moments_of, textbook
from handmade_gptq import gptq_folder
from tied_pair import tied
from tiny import read_tensors, tiny_eagle3_llama, values_of
from torch import Tensor
from verify_cases import edit
from weight_formats import INT4, INT4_GROUPS, MXFP4, NVFP4, TWO_STAGES

FORMATS = {
    "int4": INT4, "int4-groups": INT4_GROUPS, "int4-of-fp8": TWO_STAGES, "nvfp4": NVFP4,
    "mxfp4": MXFP4,
}  # fmt: skip
GPTQ = Algorithm(scale="mse", rounding="gptq")
CORRECTED = dataclasses.replace(GPTQ, input_correction="auto")
BY_ABSMAX = get_backend("torch", Algorithm(scale="absmax", rounding="gptq"))


@pytest.mark.parametrize(
    ("name", "scale"),
    [("int4", "absmax"), ("int4-groups", "mse"), ("int4-of-fp8", "absmax"), ("nvfp4", "mse"),
     ("mxfp4", "absmax")],
)  # fmt: skip
def test_textbook_codes(name: str, scale: ScaleChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    """160 columns: more than are rounded between two matrix products."""
    monkeypatch.setattr("draftquant.quantize.algorithms.gptq_rounding._BLOCK", 64)
    weights = FORMATS[name]
    w, x = gaussian(24, 160).bfloat16(), inputs(160)
    backend = get_backend("torch", Algorithm(scale=scale, rounding="gptq"))
    found = backend.quantize(w, weights, None, moments_of(x))
    same = code_values(found.codes) == code_values(textbook(w.float(), weights, found, x))
    # Where float32 and float64 fall on two sides of a middle, the columns after it differ too.
    assert same.float().mean() > 0.97
    assert same.all(dim=1).float().mean() > 0.6
    # products of other shapes are summed in other orders
    absmax = w.abs().amax().float().reshape(1, 1)
    whole = backend.quantize(w, weights, absmax, moments_of(x))
    parts = [backend.quantize(rows, weights, absmax, moments_of(x)).codes for rows in w.split(8)]
    assert (whole.codes == torch.cat(parts)).float().mean() > 0.99


@pytest.mark.parametrize("name", ["int4", "int4-of-fp8"])
def test_inputs_that_say_nothing_of_each_other_give_the_nearest_codes(name: str) -> None:
    w, weights = gaussian(16, 64).bfloat16(), FORMATS[name]
    w[0, :2] = torch.tensor((3.515625, 1.171875))  # 2.5 steps, more by the reciprocal of a step
    for moments in (torch.eye(64), torch.zeros(64, 64)):
        found = BY_ABSMAX.quantize(w, weights, None, InputMoments(moments))
        nearest = get_backend("torch").quantize(w, weights)
        assert torch.equal(found.scale.float(), nearest.scale.float())
        different = code_values(found.codes) != code_values(nearest.codes)
        # Of two stages the weight itself is rounded, not its FP8 value.
        assert different.float().mean() <= (0.05 if weights.first_stage else 0.0)


def test_damping_rises_until_there_is_a_factor() -> None:
    """What no inputs give, but rounding may: eigenvalues below zero."""
    w, weights = gaussian(8, 64).bfloat16(), FORMATS["int4"]
    for least, damping in ((0.5, 0.01), (-0.05, 0.1), (-0.5, 1.0)):
        used: list[float] = []
        mean = torch.diag(torch.tensor([least, *[1.0] * 63]))
        moments = InputMoments(mean, on_factor=used.append)
        BY_ABSMAX.quantize(w, weights, None, moments)
        assert used == [damping]
    indefinite = torch.diag(torch.tensor([-2.0, *[1.0] * 63]))
    for precise, fix in ((False, "--precise"), (True, "calibrate on more")):
        moments = InputMoments(indefinite, name="a.q_proj", precise=precise)
        with pytest.raises(BackendError, match=r"a\.q_proj: GPTQ finds no Cholesky") as caught:
            BY_ABSMAX.quantize(w, weights, None, moments)
        assert fix in caught.value.fix.split(", or")[0]


def test_rows_that_a_toolkit_takes_for_inputs_have_their_moments() -> None:
    """With the first damping: a hundredth of the mean of the diagonal."""
    moments = moments_of(inputs(48))
    rows, diagonal = moments.as_inputs, moments.mean.diagonal()
    damped = moments.mean + 0.01 * diagonal.mean() * torch.eye(48)
    assert torch.allclose(rows.T @ rows / len(rows), damped, atol=1e-5)
    assert torch.equal(moments.squares, diagonal)


# ---- correction for rounded inputs


def rounded_inputs(columns: int) -> tuple[Tensor, Tensor]:
    """Inputs that depend on each other, and what a coarse rounding makes of them."""
    x = inputs(columns, 1200)
    step = x.abs().amax(dim=1, keepdim=True) / 3
    return x, (x / step).round() * step


def test_the_corrected_weight_is_that_of_its_definition() -> None:
    """(W C + d W) (H + d I)^-1, with C of inputs before and after rounding."""
    x, rounded = rounded_inputs(96)
    rounded = x + (rounded - x) / 8
    w = gaussian(8, 96)
    c, h = (t.double().T @ rounded.double() / len(x) for t in (x, rounded))
    damping = 0.01 * h.diagonal().mean()
    wide = w.double()
    exact = (wide @ c + damping * wide) @ torch.linalg.inv(h + damping * torch.eye(96))
    moments = InputMoments(moments_of(rounded).mean, lost=(x - rounded).T @ rounded / len(x))
    assert (moments.corrected(w) - exact).norm() < 1e-4 * (exact - wide).norm()
    assert (exact - wide).norm() > 0.01 * wide.norm()


def test_codes_are_those_of_the_corrected_weight() -> None:
    x, rounded = rounded_inputs(96)
    w, weights = gaussian(16, 96), FORMATS["int4"]
    moments = InputMoments(moments_of(rounded).mean, lost=(x - rounded).T @ rounded / len(x))
    found = BY_ABSMAX.quantize(w, weights, None, moments)
    for given, least, most in ((moments.corrected(w), 0.97, 1), (w, 0, 0.97)):
        wanted = textbook(given, weights, found, rounded)
        assert least <= (code_values(found.codes) == code_values(wanted)).float().mean() <= most


def test_no_row_goes_further_than_verify_allows() -> None:
    """However much the inputs ask for: the change keeps its direction."""
    x, rounded = rounded_inputs(96)
    w, mean = gaussian(8, 96), moments_of(rounded).mean
    lost = (x - rounded).T @ rounded / len(x)
    weak, strong = (InputMoments(mean, lost=lost * f).corrected(w) - w for f in (0.01, 100.0))
    assert torch.allclose(strong.norm(dim=1), MOST_CHANGED * w.norm(dim=1))
    assert (torch.cosine_similarity(weak, strong) > 0.999).all()


def test_rounding_that_takes_nothing_changes_nothing() -> None:
    """Of moments without what is lost, the weight goes to GPTQ bit for bit."""
    w, mean = gaussian(8, 96).bfloat16(), moments_of(inputs(96)).mean
    assert torch.equal(InputMoments(mean).corrected(w), w.float())
    w[3] = 0  # a row of which no share can be taken
    assert torch.equal(InputMoments(mean, lost=torch.zeros_like(mean)).corrected(w), w.float())


@pytest.mark.parametrize(
    ("recipe", "algorithm", "asked", "found"),
    [
        ("blackwell-nvfp4", "gptq", None, "auto"),
        ("mi325x-w4a8", "gptq", None, "off"),  # to FP8: nothing to win
        ("blackwell-nvfp4-learned", None, "off", "off"),
        ("blackwell-nvfp4-learned", "mse", None, "off"),
    ],
)
def test_the_command_line_corrects_where_it_pays(
    recipe: str, algorithm: str | None, asked: Any, found: str
) -> None:
    chosen = chosen_recipe(RecipeChoice(recipe, None, algorithm, asked))
    assert chosen.algorithm.input_correction == found


def test_what_cannot_correct_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="rounding nearest measures nothing of the inputs"):
        chosen_recipe(RecipeChoice("blackwell-nvfp4", input_correction="auto"))
    with pytest.raises(RecipeError, match=r"only draftquant's own backend \(torch\) corrects"):
        chosen_recipe(RecipeChoice("mi355-mxfp4", "quark", "gptq", "auto"))
    file = tmp_path / "own.yaml"
    own = "extends: fp8-ptpc\nname: own\nalgorithm: {input_correction: auto}\n"
    file.write_text(own, encoding="utf-8")
    with pytest.raises(RecipeError, match="input_correction: leave it out"):
        load_recipe(file)


HASH_OF_0_2 = "9b798fa607c4df3cf4dcbac504769b76570a1850958f9f9e935a12d7c8e1c0f6"
"""Of blackwell-nvfp4 with --algorithm gptq, as an earlier build wrote it."""


def test_records_of_recipes_without_it_keep_their_hash() -> None:
    recipe = chosen_recipe(RecipeChoice("blackwell-nvfp4", None, "gptq", "off"))
    assert recipe_sha256(recipe) == HASH_OF_0_2
    assert recipe_sha256(dataclasses.replace(recipe, algorithm=CORRECTED)) != HASH_OF_0_2
    assert CORRECTED.to_nearest == GPTQ.to_nearest


# ---- the command


@dataclasses.dataclass(frozen=True)
class Made:
    """A draft by GPTQ, its record, and what was said."""

    out: Path
    record: dict[str, Any]
    said: str


def quantized(out: Path, *asked: str) -> Made:
    """The tied draft, with its traces."""
    given = ("--traces", str(tied() / "traces"), "--out", str(out), "--algorithm", "gptq")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(["quantize", str(tied() / "draft"), *asked, *given]) == 0
    record = json.loads((out / "draftquant.json").read_text(encoding="utf-8"))
    return Made(out, record, " ".join(said.getvalue().split()))


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return quantized(tmp_path_factory.mktemp("nvfp4") / "out", "--recipe", "blackwell-nvfp4")


def test_a_draft_is_made_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, and of matrices that nothing but the first damping was added to: with more."""
    factor, done = torch.linalg.cholesky_ex, list[torch.dtype]()

    def fails_once(moments: Tensor, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        found = factor(moments, out=out)
        done.append(moments.dtype)
        return (found[0], found[1].fill_(1)) if len(done) == 1 else (found[0], found[1])

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails_once)
    made = quantized(tmp_path / "a", "--recipe", "int4-channel", "--precise")
    assert "inputs from 4 traces, steps 1..3" in made.said
    assert "3 linear(s) have no Cholesky factor" in made.said
    assert set(done) == {torch.float64}
    raised = {f"layers.0.self_attn.{name}_proj": 0.1 for name in "qkv"}
    assert made.record["gptq"] == {"dtype": "float64", "damping": raised}
    assert made.record["recipe"]["algorithm"]["rounding"] == "gptq"
    assert len(made.record["calibration_prompts"]) == 4
    report = verify(made.out, tied() / "draft")
    assert report.ok
    assert "quantized values with at most 4 times the error of the nearest" in report.rule
    loaded = load_draft(made.out)
    before = load_draft(tied() / "draft").weights
    changed = [n for n, w in loaded.weights.items() if not torch.equal(w, before[n])]
    balanced = {"layers.0.input_layernorm.weight"}
    assert {*changed} - balanced == {f"{n}.weight" for n in loaded.linears}


def test_the_record_says_how_far_the_inputs_were_believed(nvfp4: Made, tmp_path: Path) -> None:
    """And few prompts are said before anything runs."""
    assert nvfp4.record["recipe"]["algorithm"]["input_correction"] == "auto"
    found = nvfp4.record["gptq"]["input_correction"]
    assert len(found) == 7
    assert "damping" not in nvfp4.record["gptq"]  # nothing was raised
    by_layer = {name.rpartition(".")[2]: damping for name, damping in found.items()}
    assert by_layer["q_proj"] == by_layer["k_proj"] > by_layer["gate_proj"] > 0.01  # 128, 64 inputs
    said = "input correction: 4 prompts give at least 252 inputs for the 128 columns of"
    assert said in nvfp4.said
    assert "about 66 prompts like these" in nvfp4.said
    for recipe, choice in (("blackwell-nvfp4", "off"), ("int4-channel", "auto")):  # of no inputs
        how = ("--recipe", recipe, "--input-correction", choice)
        assert "input correction" not in quantized(tmp_path / choice, *how).said


def permuted(packed: np.ndarray[Any, Any]) -> None:
    packed[:] = np.roll(packed, 1, axis=0)


def doubled(packed: np.ndarray[Any, Any]) -> None:
    """Magnitudes 1, 2, 3 for 0.5, 1, 1.5: the next two codes."""
    codes = np.stack([packed & 7, packed >> 4 & 7])
    bigger = np.where((codes > 0) & (codes < 5), codes + 2, codes)
    packed[:] = packed & 0x88 | bigger[0] | bigger[1] << 4


@pytest.mark.parametrize("attack", [permuted, doubled])
def test_verify_sees_what_correction_never_does(
    attack: Callable[[np.ndarray[Any, Any]], None], nvfp4: Made, tmp_path: Path
) -> None:
    """Beside the digest, which whoever changes a folder can write anew."""
    out = tmp_path / "out"
    shutil.copytree(nvfp4.out, out)
    name, stored = next(x for x in read_tensors(out).items() if x[0].endswith("up_proj.weight"))
    packed = np.frombuffer(stored.data, np.uint8).reshape(stored.shape).copy()
    attack(packed)
    edit(out, lambda t: t.update({name: stored._replace(data=packed.tobytes())}))
    faults = [fault for fault in verify(out, tied() / "draft").faults if fault.where == name]
    assert ["quantized values with at most" in fault.expected for fault in faults] == [True]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    given = ("--traces", str(tied() / "traces"), "--out", str(tmp_path / "out"))
    for asked in ("fp8-ptpc --algorithm gptq", "int4-channel --input-scale 1"):
        assert main(["quantize", str(tied() / "draft"), "--recipe", *asked.split(), *given]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::draftquant.recipes.errors.DraftQuantWarning")
def test_traces_that_are_not_needed_are_not_looked_at(tmp_path: Path) -> None:
    """One command line serves a loop over recipes; the prompts stay unseen, so they may judge."""
    draft, traces = tied() / "draft", tied() / "traces"
    scaled = dq.quantize(draft, "blackwell-fp8", tmp_path / "a", traces=traces, input_scale=1.0)
    report = dq.quantize(draft, "fp8-ptpc", tmp_path / "b", traces=traces)
    nearest = "scale absmax, rounding nearest looks at no inputs"
    unused = "--traces is not used:"
    of_fp8 = f"{unused} recipe fp8-ptpc stores no static input scales, and {nearest}"
    assert of_fp8 in report.warnings
    assert f"{unused} --input-scale gives the static scales, and {nearest}" in scaled.warnings
    for name in "ab":
        record = json.loads((tmp_path / name / "draftquant.json").read_text(encoding="utf-8"))
        assert record.get("calibration_prompts") is None


# ---- gPTQ folders through every verb that reads: verified, dequantized, transcoded, audited, run


UP = "midlayer.mlp.up_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}
    return tiny_eagle3_llama(tmp_path_factory.mktemp("gptq") / "source", **sizes)


KINDS: list[dict[str, Any]] = [
    {},
    {"sym": False, "desc_act": True},
    {"bits": 3, "desc_act": True},
    {"bits": 2, "sym": False, "checkpoint_format": "gptq_v2"},
]


@pytest.mark.parametrize("kind", KINDS, ids=["-".join(map(str, kind.values())) for kind in KINDS])
def test_a_sound_folder(kind: dict[str, Any], source: Path, tmp_path: Path) -> None:
    out = gptq_folder(source, tmp_path / "out", **kind)
    assert verify(out, source, foreign=True).faults == ()
    assert audit_checkpoint(Checkpoint.open(out)).faults == ()
    plain = tmp_path / "plain"
    dequantize_draft(DraftSource(folder=out), plain, dtype="F32")
    weights, loaded = read_tensors(plain), load_draft(out).weights
    name = f"{UP}.weight"
    assert np.array_equal(loaded["layers.0.mlp.up_proj.weight"].numpy(), values_of(weights[name]))
    lost = values_of(weights[name]) - values_of(read_tensors(source)[name])
    steps = 2 ** kind.get("bits", 4) - 2
    assert np.abs(lost).max() < np.abs(values_of(weights[name])).max() / steps


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        ("qweight", lambda words: np.bitwise_xor.at(words, (0, 0), 4)),
        ("scales", lambda scales: np.multiply(scales, 4, out=scales)),
        ("g_idx", lambda groups: np.copyto(groups, np.roll(groups, 1))),
        ("g_idx", lambda groups: np.copyto(groups, 0)),
        ("qzeros", lambda words: np.copyto(words, words[:, ::-1].copy())),
    ],
)
def test_a_damaged_folder(suffix: str, change: Any, source: Path, tmp_path: Path) -> None:
    out = gptq_folder(source, tmp_path / "out", sym=False, desc_act=True)
    tensor = read_tensors(out)[f"{UP}.{suffix}"]
    dtype = {"I32": "<i4", "F16": "<f2"}[tensor.dtype]
    array = np.frombuffer(tensor.data, dtype).reshape(tensor.shape).copy()
    change(array)
    damaged = tensor._replace(data=array.tobytes())
    edit(out, lambda tensors: tensors.update({f"{UP}.{suffix}": damaged}))
    faults = verify(out, source, foreign=True).faults
    assert faults
    assert all(fault.where.startswith(UP) for fault in faults)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (("+:.*up_proj", "-:.*mlp.*"), {"gate_proj", "down_proj"}),
        (("-:.*mlp.*", "+:.*up_proj"), {"up_proj", "gate_proj", "down_proj"}),
    ],
)
def test_the_first_rule_of_dynamic_decides(
    rules: tuple[str, ...], kept: set[str], source: Path, tmp_path: Path
) -> None:
    """As `get_dynamic_override` of GPTQModel; what is kept must be no codes."""
    out = gptq_folder(source, tmp_path / "out", dynamic={key: {} for key in rules})
    faults = audit_checkpoint(Checkpoint.open(out)).faults
    assert {fault.where.rpartition(".")[2] for fault in faults} == kept


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ({}, None),
        ({"sym": False}, "compressed-tensors"),
        ({"desc_act": True}, "awq"),
        ({"group_size": 16}, "compressed-tensors"),
    ],
)
def test_no_layout_holds(kind: dict[str, Any], layout: Any, source: Path, tmp_path: Path) -> None:
    out = gptq_folder(source, tmp_path / "out", **kind)
    with pytest.raises(LayoutError):
        plan_transcoding(DraftSource(folder=out), layout, target_layers=4)
