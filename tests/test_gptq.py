"""GPTQ: against the textbook form of it, slow and exact; the command; what verify says of it."""

import json
from pathlib import Path

import pytest
import torch
from draftquant import api as dq
from draftquant.quantize.algorithms import InputMoments
from draftquant.quantize.backends import get_backend
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight, code_values
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import Algorithm, WeightFormat
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import ScaleChoice
from draftquant.scripts.cli import main
from gptq_textbook import gaussian, inputs, moments_of, textbook
from tied_pair import tied
from tiny import read_tensors
from torch import Tensor
from verify_cases import edit, flip_bit

FORMATS = {
    "int4": WeightFormat(dtype="int4", granularity="channel", symmetric=True),
    "int4-groups": WeightFormat(
        dtype="int4", granularity="group", symmetric=True, group_size=32
    ),
    "int4-of-fp8": WeightFormat(
        dtype="int4", granularity="channel", symmetric=True, first_stage="fp8_e4m3"
    ),
    "nvfp4": WeightFormat(dtype="nvfp4", granularity="group", symmetric=True, group_size=16),
    "mxfp4": WeightFormat(dtype="mxfp4", granularity="group", symmetric=True, group_size=32),
}  # fmt: skip

KINDS: list[tuple[str, ScaleChoice]] = [
    (name, scale)
    for name in FORMATS
    for scale in ("absmax", "mse")
    if not (FORMATS[name].first_stage and scale == "mse")  # mse searches scales of one stage
]


def gptq(scale: ScaleChoice) -> Algorithm:
    return Algorithm(scale=scale, rounding="gptq")


def quantized(weights: WeightFormat, w: Tensor, x: Tensor, scale: ScaleChoice) -> QuantizedWeight:
    return get_backend("torch", gptq(scale)).quantize(w, weights, None, moments_of(x))


@pytest.mark.parametrize(("name", "scale"), KINDS)
def test_codes_are_those_of_the_textbook(name: str, scale: ScaleChoice) -> None:
    """160 columns: more than are rounded between two matrix products."""
    weights = FORMATS[name]
    w, x = gaussian(24, 160).bfloat16(), inputs(160)
    found = quantized(weights, w, x, scale)
    wanted = textbook(w.float(), weights, found, x)
    same = (code_values(found.codes) == code_values(wanted)).float().mean()
    # Where float32 and float64 fall on two sides of a middle, the columns after it differ too.
    assert same > 0.97
    rows = (code_values(found.codes) == code_values(wanted)).all(dim=1)
    assert rows.float().mean() > 0.6


@pytest.mark.parametrize("name", ["int4", "int4-of-fp8", "nvfp4"])
def test_inputs_that_say_nothing_of_each_other_give_the_nearest_codes(name: str) -> None:
    w = gaussian(16, 64).bfloat16()
    weights = FORMATS[name]
    for moments in (torch.eye(64), torch.zeros(64, 64)):
        backend = get_backend("torch", gptq("absmax"))
        found = backend.quantize(w, weights, None, InputMoments(moments))
        nearest = get_backend("torch").quantize(w, weights)
        assert torch.equal(found.scale.float(), nearest.scale.float())
        different = code_values(found.codes) != code_values(nearest.codes)
        # Of two stages the weight itself is rounded, not its FP8 value.
        assert different.float().mean() <= (0.05 if weights.first_stage else 0.0)


@pytest.mark.parametrize("name", ["int4-groups", "mxfp4"])
def test_blocks_of_rows_give_the_codes_of_the_whole(name: str) -> None:
    w, x, weights = gaussian(24, 96).bfloat16(), inputs(96), FORMATS[name]
    backend, moments = get_backend("torch", gptq("absmax")), moments_of(x)
    absmax = w.abs().amax().float().reshape(1, 1)
    whole = backend.quantize(w, weights, absmax, moments)
    parts = [backend.quantize(rows, weights, absmax, moments) for rows in w.split(8)]
    same = whole.codes == torch.cat([part.codes for part in parts])
    assert same.float().mean() > 0.99  # products of other shapes are summed in other orders


def test_a_factor_in_float64_gives_the_same_codes() -> None:
    """704 columns: three blocks. Where a column falls near a middle, those after it differ too."""
    w, x, weights = gaussian(24, 704).bfloat16(), inputs(704, 1400), FORMATS["int4-groups"]
    moments = [InputMoments(moments_of(x).mean, precise=precise) for precise in (False, True)]
    found = [get_backend("torch", gptq("absmax")).quantize(w, weights, None, m) for m in moments]
    assert (found[0].codes == found[1].codes).float().mean() > 0.99
    exact = torch.linalg.cholesky(damped(moments[0].mean, moments[0].feedback().order))
    errors = [(m.feedback().factor - exact).norm() / exact.norm() for m in moments]
    assert errors[1] < 1e-7 < errors[0] < 1e-5  # both are kept in float32


def damped(mean: Tensor, order: Tensor) -> Tensor:
    moments = mean.double()[order][:, order]
    return moments + 0.01 * moments.diagonal().mean() * torch.eye(len(moments))


def test_damping_rises_until_there_is_a_factor() -> None:
    """What no inputs give, but rounding may: eigenvalues below zero."""
    w, weights = gaussian(8, 64).bfloat16(), FORMATS["int4"]
    for least, damping in ((0.5, 0.01), (-0.05, 0.1), (-0.5, 1.0)):
        used: list[float] = []
        mean = torch.diag(torch.tensor([least, *[1.0] * 63]))
        moments = InputMoments(mean, on_factor=used.append)
        get_backend("torch", gptq("absmax")).quantize(w, weights, None, moments)
        assert used == [damping]
    for precise, fix in ((False, "--precise"), (True, "calibrate on more")):
        moments = InputMoments(
            torch.diag(torch.tensor([-2.0, *[1.0] * 63])), name="a.q_proj", precise=precise
        )
        with pytest.raises(BackendError, match=r"a\.q_proj: GPTQ finds no Cholesky") as caught:
            get_backend("torch", gptq("absmax")).quantize(w, weights, None, moments)
        assert fix in caught.value.fix.split(", or")[0]


# ---- the command


@pytest.fixture(scope="module")
def folder() -> Path:
    return tied()


def quantize(folder: Path, out: Path, *arguments: str) -> int:
    return main(["quantize", str(folder / "draft"), "--out", str(out), *arguments])


def traced(folder: Path) -> tuple[str, str]:
    return "--traces", str(folder / "traces")


@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["int4-channel", "mi325x-w4a8", "mi325x-w4a8-fp8"])
def test_a_draft_is_quantized_verified_and_loaded(
    recipe: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--recipe", recipe, "--algorithm", "gptq", *traced(folder))
    assert quantize(folder, tmp_path / "a", *arguments) == 0
    assert "inputs from 4 traces, steps 1..3" in capsys.readouterr().err
    assert quantize(folder, tmp_path / "b", *arguments) == 0
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    assert quantize(folder, tmp_path / "absmax", "--recipe", recipe) == 0
    report = verify(tmp_path / "a", folder / "draft")
    assert report.ok
    assert report.rule == (
        "scales of a search around absmax, quantized values with at most 4 times the error"
        " of the nearest"
    )
    record = json.loads((tmp_path / "a" / "draftquant.json").read_text(encoding="utf-8"))
    assert record["recipe"]["backend"] == "torch"
    assert record["recipe"]["algorithm"]["rounding"] == "gptq"
    assert len(record["calibration_prompts"]) == 4
    assert record["gptq"] == {"dtype": "float32"}
    weights = {name: load_draft(tmp_path / name).weights for name in ("a", "absmax")}
    changed = [n for n in weights["a"] if not torch.equal(weights["a"][n], weights["absmax"][n])]
    assert sorted(changed) == sorted(f"{n}.weight" for n in load_draft(tmp_path / "a").linears)


def test_more_damping_and_float64_are_recorded(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factor = torch.linalg.cholesky_ex

    def fails_once(moments: Tensor, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of matrices that nothing but the first damping was added to."""
        found = factor(moments, out=out)
        done.append(moments.dtype)
        return (found[0], found[1].fill_(1)) if len(done) == 1 else (found[0], found[1])

    done: list[torch.dtype] = []
    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails_once)
    arguments = ("--recipe", "int4-channel", "--algorithm", "gptq", "--precise", *traced(folder))
    assert quantize(folder, tmp_path / "out", *arguments) == 0
    assert "3 linear(s) have no Cholesky factor" in " ".join(capsys.readouterr().err.split())
    assert set(done) == {torch.float64}
    record = json.loads((tmp_path / "out" / "draftquant.json").read_text(encoding="utf-8"))
    raised = {f"layers.0.self_attn.{name}_proj": 0.1 for name in "qkv"}
    assert record["gptq"] == {"dtype": "float64", "damping": raised}


def test_verify_sees_rows_that_changed_places(folder: Path, tmp_path: Path) -> None:
    """The weight does not say what each code must be; rows of other weights are too far off."""
    out = tmp_path / "out"
    assert quantize(folder, out, "--recipe", "int4-channel", "--algorithm", "gptq",
                    *traced(folder)) == 0  # fmt: skip
    tensors = read_tensors(out)
    name = next(n for n in tensors if n.endswith("up_proj.weight_packed"))
    packed = tensors[name]
    width = len(packed.data) // packed.shape[0]
    rows = [packed.data[i * width : (i + 1) * width] for i in range(packed.shape[0])]
    rows[0], rows[1] = rows[1], rows[0]
    edit(out, lambda t: t.update({name: packed._replace(data=b"".join(rows))}))
    (fault, *_) = [f for f in verify(out, folder / "draft").faults if f.where == name]
    assert "quantized values with at most" in fault.expected
    # One step of one code: within what GPTQ does itself.
    edit(out, lambda t: t.update({name: flip_bit(packed, 0)}))
    where = {fault.where for fault in verify(out, folder / "draft").faults}
    # `edit` writes no metadata.
    assert where == {f"draftquant.json: tensor_digests.{name}", "__metadata__: format"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--recipe", "int4-channel", "--algorithm", "gptq"), ("must know the inputs", "--traces")),
        (
            ("--recipe", "fp8-ptpc", "--algorithm", "gptq", "TRACES"),
            ("rounding to fp8_e4m3 loses too little", "rounding: nearest"),
        ),
        (
            ("--recipe", "mi325x-w4a8-gptq", "--backend", "quark", "TRACES"),
            ("backend quark, scale mse, rounding gptq", "takes absmax scales", "--algorithm gptq"),
        ),
        (
            ("--recipe", "int4-channel", "--input-scale", "1", "TRACES"),
            ("the recipe's activations are not static", "leave --input-scale out"),
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: tuple[str, ...],
    words: tuple[str, ...],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [x for a in arguments for x in (traced(folder) if a == "TRACES" else (a,))]
    assert quantize(folder, tmp_path / "out", *given) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert all(word in said for word in words), said
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::draftquant.recipes.errors.DraftQuantWarning")
def test_traces_that_are_not_needed_are_not_looked_at(folder: Path, tmp_path: Path) -> None:
    """One command line serves a loop over recipes; the prompts stay unseen, so they may judge."""
    draft, traces = folder / "draft", folder / "traces"
    scaled = dq.quantize(draft, "blackwell-fp8", tmp_path / "a", traces=traces, input_scale=1.0)
    plain = dq.quantize(draft, "fp8-ptpc", tmp_path / "b")
    report = dq.quantize(draft, "fp8-ptpc", tmp_path / "c", traces=traces)
    nearest = "scale absmax, rounding nearest looks at no inputs"
    said = f"traces= is not used: recipe fp8-ptpc stores no static input scales, and {nearest}"
    assert {*report.warnings} - {*plain.warnings} == {said}
    assert f"traces= is not used: input_scale= gives the static scales, and {nearest}" in (
        scaled.warnings
    )
    for name in ("a", "b", "c"):
        record = json.loads((tmp_path / name / "draftquant.json").read_text(encoding="utf-8"))
        assert record.get("calibration_prompts") is None
    assert read_tensors(tmp_path / "b") == read_tensors(tmp_path / "c")
