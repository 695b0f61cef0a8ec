"""`verify` on folders made by hand that are wrong by the least that counts, in every number format.

One code that is the second nearest, at a weight that lies almost between the two; one scale that is
a step off, with codes that are right for it. Each as somebody else's folder, whose roundings are
allowed for, and as one of ours, where nothing is.
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from draftquant.quantize.verify import VerifyReport, verify
from draftquant.scripts.verbs.verify import print_verification
from handmade import LINEARS, MADE, Made, by_hand, pack, quantize_by_hand, stored_parts
from handmade_numbers import (
    HALF,
    Array,
    Rounded,
    code_values,
    codes_under,
    covered,
    e4m3_value,
    e4m3_values,
    nearest_e4m3,
    spread,
)
from tiny import Stored, fused_absmax, read_tensors, store, tiny_eagle3_llama, values_of
from verify_cases import ATTENTION, STATIC, assert_only_fault, copy_of, edit, faults_of, method_of

__all__ = ["copy_of"]  # a fixture
O = f"{ATTENTION}o_proj"  # noqa: E741 - not fused with anything
SCALES = {"awq": "scales", "fp8-block": "weight_scale_inv"}
WHOLE = {  # one scale over the matrix: suffix, divisor
    "ct-fp8-static": ("weight_scale", 448),
    "modelopt-fp8": ("weight_scale", 448),
    "modelopt-nvfp4": ("weight_scale_2", 2688),
    "ct-nvfp4": ("weight_global_scale", 2688),
}
FEW = ("quark-int4", "ct-int4-group", "ct-int8", "awq", "ct-fp8", "quark-fp8-static", "fp8-block",
       "modelopt-nvfp4", "quark-mxfp4")  # fmt: skip
"""Each number format, layout and granularity."""
Copy = Callable[[str], Path]
OWN = pytest.mark.parametrize("own", [False, True], ids=["another tool", "draftquant"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats") / "source"
    return tiny_eagle3_llama(folder, heads=12, intermediate=32, vocab=32)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """One correct folder per layout, made when it is first asked for."""
    folder, done = tmp_path_factory.mktemp("made"), dict[str, Path]()

    def make(name: str) -> Path:
        if name not in done:
            done[name] = quantize_by_hand(source, folder / name, MADE[name], share=True)
        return done[name]

    return make


def checked(out: Path, source: Path, own: bool) -> VerifyReport:
    return verify(out, source, method=method_of(out) if own else None, foreign=not own)


@pytest.mark.each_value
@OWN
@pytest.mark.parametrize("name", sorted(MADE))
def test_a_right_folder_passes_as_anybodys(made: Copy, source: Path, name: str, own: bool) -> None:
    assert checked(made(name), source, own).faults == ()


@pytest.mark.parametrize("errors", [[], [None, None], [None, 0.98765], [0.5, 0.98765]])
def test_a_bound_is_shown_wherever_a_linear_has_one(
    errors: list[float | None], made: Copy, source: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    report = checked(made("ct-fp8"), source, own=False)
    linears = (dataclasses.replace(report.linears[0], max_error=error) for error in errors)
    print_verification(dataclasses.replace(report, linears=tuple(linears)))
    shown, told = capsys.readouterr().out, [one for one in errors if one is not None]
    assert ("error / allowed" in shown) == bool(told)
    assert all(f"{one:.4f}" in shown for one in told)


def weight_of(source: Path) -> Array:
    return values_of(read_tensors(source)[f"{O}.weight"])


def rounded_of(source: Path, made: Made) -> Rounded:
    return by_hand(read_tensors(source)[f"{O}.weight"], made)


def store_instead(out: Path, found: Rounded, made: Made) -> None:
    """Put other codes and scales into a folder; input scales stay."""
    parts = stored_parts(found, "BF16", made)
    edit(out, lambda tensors: tensors.update({f"{O}.{s}": part for s, part in parts.items()}))


def codes_name(made: Made) -> str:
    packed = made.layout == "compressed-tensors" and made.dtype != "fp8"
    return f"{O}.{'qweight' if made.layout == 'awq' else 'weight_packed' if packed else 'weight'}"


def scale_name(name: str) -> str:
    return f"{O}.{SCALES.get(name, 'weight_scale')}"


# ---- codes

CLEAR = {"int4": 2.0**-4, "int8": 0.6, "fp8": 2.0**-6, "nvfp4": 2.0**-10, "mxfp4": 2.0**-10}
"""Twice what verify must allow: one rounding of weight/scale to BF16, as other tools do."""


@OWN
@pytest.mark.parametrize("name", FEW)
def test_the_second_nearest_code_is_a_fault(
    copy_of: Copy, source: Path, name: str, own: bool
) -> None:
    out, made, w = copy_of(name), MADE[name], weight_of(source)
    right = rounded_of(source, made)  # o_proj is fused with nothing
    wide = spread(right.scale, made.dtype, made.granularity, w.shape).astype(np.float64)
    x = w / (wide if right.whole is None else wide * right.whole)
    row, column, second = almost_between(x, right.codes, made, 2.0**-18 if own else None)
    wrong = right.codes.copy()
    wrong[row, column] = second
    store_instead(out, right._replace(codes=wrong), made)
    report = checked(out, source, own)
    assert_only_fault(report, codes_name(made), "1 other(s), ")
    assert f" at row {row}, column {column}: code" in report.faults[0].got


def almost_between(x: Array, codes: Array, made: Made, least: float | None) -> tuple[int, int, int]:
    """Where the second nearest code is hardly further away than the nearest, and that code."""
    values = code_values(made.dtype)
    numbers, order = list(values), np.array(list(values.values()))
    place = {code: i for i, code in enumerate(numbers)}
    minus_zero = {"fp8": 128, "nvfp4": 8, "mxfp4": 8}.get(made.dtype)
    index = np.vectorize(lambda code: place[0 if code == minus_zero else int(code)])(codes)
    other = np.clip(index + np.where(x > order[index], 1, -1), 0, len(order) - 1)
    gap = np.abs(x - order[other]) - np.abs(x - order[index])
    size = np.ones_like(x) if made.dtype in HALF else np.abs(x)
    clear = gap > (CLEAR[made.dtype] if least is None else least) * size
    clear &= (other != index) & (np.abs(x) < order[-1])
    row, column = divmod(int(np.where(clear, gap / (size + 2.0**-6), np.inf).argmin()), x.shape[1])
    return row, column, numbers[other[row, column]]


def next_scales(name: str, made: Made, right: Rounded, w: Array) -> tuple[Array, Array]:
    """Which scale is the easiest to take for right, and the wrong values for it.

    A step of BF16 and of F16 are 2^-8 and 2^-11 of the scale or more; three of them are taken, and
    of F32 one percent. NVFP4: the second nearest E4M3 value, where it is nearest. MXFP4: twice.
    """
    at = np.unravel_index(3 % right.scale.size, right.scale.shape)
    if made.dtype == "mxfp4":
        return np.array(at), right.scale[at] * np.array([2, 0.5], np.float32)
    if made.dtype == "nvfp4":
        exact = covered(w, made.dtype, made.granularity) / (6 * np.float64(right.whole))
        values = np.array([e4m3_value(code) for code in range(127)])
        i = np.searchsorted(values, right.scale)
        other = values[np.clip(i + np.where(exact > right.scale, 1, -1), 0, 126)]
        # Half a step is 2^-4 of the value at most: that much is allowed of any scale.
        distance = np.abs(other - exact) / exact
        clear = (distance > 2.0**-4 + 2.0**-9) & (right.scale >= 2.0**-6)
        at = np.unravel_index(np.where(clear, distance, np.inf).argmin(), exact.shape)
        return np.array(at), other[at].astype(np.float32).reshape(1)
    factor = {"awq": 2.0**-8, "int4": 2.0**-6, "int8": 2.0**-6}.get(
        "awq" if name == "awq" else made.dtype, 0.01
    )
    return np.array(at), right.scale[at] * np.array([1 + factor, 1 - factor], np.float32)


def one_step(value: Array, made: Made) -> Array:
    """The next smaller and the next larger number that can be stored."""
    if made.dtype == "mxfp4":
        return np.array([value / 2, value * 2], np.float32)
    if made.dtype == "nvfp4":
        values = np.array([e4m3_value(code) for code in range(127)], np.float32)
        i = int(np.searchsorted(values, value))
        return values[[i - 1, i + 1]]
    kind = {"fp8": np.float32}.get(made.dtype, np.float16 if made.layout == "awq" else np.uint16)
    if kind is np.uint16:  # BF16
        bits = np.frombuffer(store(np.array([value]), "BF16").data, kind)[0] + np.array([-1, 1])
        return values_of(Stored("BF16", (2,), bits.astype(kind).tobytes()))
    ends = np.array([-np.inf, np.inf], kind)
    return np.nextafter(np.array([value, value], kind), ends).astype(np.float32)


RULES = {
    "int4": "absmax / 7.5",
    "int8": "absmax / 127.5",
    "fp8": "absmax / 448",
    "nvfp4": "absmax / (6 * global scale)",
    "mxfp4": "2^(floor(log2(absmax)) - 2)",
}


@OWN
@pytest.mark.parametrize("name", [n for n in FEW if MADE[n].granularity != "tensor"])
def test_a_scale_one_step_off_is_a_fault_though_its_codes_are_right(
    copy_of: Copy, source: Path, name: str, own: bool
) -> None:
    out, made, w = copy_of(name), MADE[name], weight_of(source)
    right = rounded_of(source, made)
    at, wrong_values = next_scales(name, made, right, w)
    for value in one_step(right.scale[tuple(at)], made) if own else wrong_values:
        report = with_scale(out, source, made, right, at, value, own)
        row = int(at[0]) * (128 if made.granularity == "block" else 1)
        assert_only_fault(report, scale_name(name), RULES[made.dtype])
        assert f"at row {row}" in str(report.faults[0])


def with_scale(
    out: Path, source: Path, made: Made, right: Rounded, at: Array, value: float, own: bool
) -> VerifyReport:
    """The report on a folder with one other scale, and the codes that are right for it."""
    scale = right.scale.copy()
    scale[tuple(at)] = value
    if made.dtype in HALF:
        scale = values_of(store(scale, "F16" if made.layout == "awq" else "BF16"))
    codes = codes_under(weight_of(source), made.dtype, made.granularity, scale, right.whole)
    store_instead(out, Rounded(codes, scale, right.whole), made)
    return checked(out, source, own)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", [n for n in FEW if MADE[n].granularity in ("channel", "group")])
def test_a_search_takes_scales_between_its_ends(copy_of: Copy, source: Path, name: str) -> None:
    out, made, w = copy_of(name), MADE[name], weight_of(source)
    right = rounded_of(source, made)
    at = np.array(np.unravel_index(right.scale.argmin(), right.scale.shape))  # most is below 448
    ends_of = {"nvfp4": "3/2", "mxfp4": "1", "int4": "15/14", "int8": "255/254", "fp8": "1"}
    largest = Fraction(ends_of[made.dtype])
    absmax = right.scale[tuple(at)]
    ends = [absmax / 4, absmax * np.float32(largest)]
    if made.dtype == "nvfp4":  # rounded once more, from what is no E4M3 value yet
        assert right.whole is not None
        exact = covered(w, made.dtype, made.granularity)[tuple(at)] / (6 * right.whole)
        ends = list(e4m3_values(nearest_e4m3(np.array([exact / 4, exact * 1.5])), (2,)))
    if made.dtype in HALF:
        ends = list(values_of(store(np.array(ends), "F16" if made.layout == "awq" else "BF16")))
    least, most = ends

    def report(value: float) -> VerifyReport:
        with_scale(out, source, made, right, at, value, own=True)
        return verify(out, source, method=method_of(out, "mse"))

    for value in (most, absmax, least):
        assert report(value).faults == ()
    for one in (one_step(least, made)[0], one_step(most, made)[1]):
        assert_only_fault(report(one), scale_name(name), f"1/4 to {largest} of {RULES[made.dtype]}")


@pytest.mark.parametrize(("own", "sign"), [(False, -1), (True, 1)], ids=["another tool", "ours"])
@pytest.mark.parametrize("name", sorted(WHOLE))
def test_the_scale_of_a_matrix_is_that_of_its_largest_weight(
    copy_of: Copy, source: Path, name: str, sign: int, own: bool
) -> None:
    """A percent off in what somebody else made, four units in the last place in ours."""
    out, made, w = copy_of(name), MADE[name], weight_of(source)
    suffix, divisor = WHOLE[name]
    factor = 1 + sign * (2.0**-21 if own else 0.01)
    if made.dtype == "fp8":
        scale, whole = rounded_of(source, made).scale * np.float32(factor), None
    else:  # everything is right for a largest weight that is not there
        largest = fused_absmax(read_tensors(source), O) * factor
        _, scale, whole = by_hand(read_tensors(source)[f"{O}.weight"], made, largest)
    codes = codes_under(w, made.dtype, made.granularity, scale, whole)
    store_instead(out, Rounded(codes, scale, whole), made)
    faults = {fault.where: fault for fault in checked(out, source, own).faults}
    assert f"absmax / {divisor}" in faults[f"{O}.{suffix}"].expected
    assert set(faults) <= {f"{O}.{suffix}", f"{O}.weight_scale"}  # a scale of 448 may be cut


@pytest.mark.parametrize(
    ("name", "factor"), list(zip(STATIC, (1000, 0.001, 1 + 2.0**-22, 1 - 2.0**-22), strict=True))
)
def test_input_scales_are_those_of_the_run(
    copy_of: Copy, source: Path, name: str, factor: float
) -> None:
    """Of all fused linears alike, so that nothing else is wrong."""
    out = copy_of(name)
    run = method_of(out)
    assert verify(out, source, method=run).faults == ()
    keys = [f"{ATTENTION}{leaf}.input_scale" for leaf in ("q_proj", "k_proj", "v_proj")]
    value = store(values_of(read_tensors(out)[keys[0]]) * np.float32(factor), "F32")
    edit(out, lambda tensors: tensors.update(dict.fromkeys(keys, value)))
    faults = verify(out, source, method=run).faults
    assert [fault.where for fault in faults] == sorted(keys)
    assert all("0.05" in fault.expected and "of the run" in fault.expected for fault in faults)
    assert verify(out, source, foreign=True).ok  # of another tool's, nothing is known


@pytest.mark.parametrize("column", [100, 103])
def test_the_padding_of_a_word_holds_code_0(column: int, tmp_path: Path) -> None:
    """100 inputs fill 12 words and a half; nobody reads the rest, but two runs must not differ."""
    module, made = "midlayer.mlp.down_proj", MADE["ct-int4"]
    source = tiny_eagle3_llama(tmp_path / "source", intermediate=100)
    out = quantize_by_hand(source, tmp_path / "out", made)
    codes = np.pad(by_hand(read_tensors(source)[f"{module}.weight"], made).codes, ((0, 0), (0, 4)))
    name = f"{module}.weight_packed"
    edit(out, lambda tensors: tensors.update({name: pack(codes + 8, "order")}))
    assert checked(out, source, own=True).faults == ()
    codes[31, column] = 1
    edit(out, lambda tensors: tensors.update({name: pack(codes + 8, "order")}))
    report = checked(out, source, own=True)
    assert_only_fault(report, name, "padding of the last word of a row with 0, got 1 other(s)")
    assert checked(out, source, own=False).faults == ()


@pytest.mark.parametrize("name", ["modelopt-fp8", "modelopt-nvfp4", "ct-nvfp4"])
def test_fused_linears_with_scales_of_their_own_are_a_fault(
    copy_of: Copy, source: Path, name: str
) -> None:
    """Right for each weight alone; of others' NVFP4 engines take one for all, FP8 they round again.

    In what we wrote both are faults.
    """
    out, made = copy_of(name), MADE[name]
    suffix = WHOLE[name][0]
    for module in (f"{ATTENTION}{leaf}" for leaf in LINEARS[:3]):
        parts = stored_parts(by_hand(read_tensors(source)[f"{module}.weight"], made), "BF16", made)
        named = {f"{module}.{suffix}": part for suffix, part in parts.items()}
        edit(out, lambda tensors, named=named: tensors.update(named))
    own = faults_of(checked(out, source, own=True))
    assert f".{suffix}: expected absmax of midlayer.self_attn." in own
    report = checked(out, source, own=False)
    if name == "modelopt-fp8":
        assert report.faults == ()
    else:
        assert_only_fault(report, suffix, f"expected one {suffix} for fused linears")
