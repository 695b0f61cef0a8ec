"""How far codes and scales of other tools may lie from ours, by the roundings that they do."""

from types import SimpleNamespace
from typing import Any

import draftquant.quantize.verify.foreign_rules as foreign_rules
import numpy as np
import pytest
from draftquant.quantize.stored.layouts import READ_LAYOUTS
from draftquant.quantize.stored.layouts.scheme import DeclaredScheme
from draftquant.quantize.verify.code_judges import Block, Buffers, Near, Nearest
from draftquant.quantize.verify.foreign_rules import (
    AboutNearest,
    NearestOrCompensated,
    about_absmax_faults,
    foreign_judge,
)


def scheme(layout: str, dtype: Any, granularity: Any = "channel", **more: Any) -> DeclaredScheme:
    return DeclaredScheme(
        layout=READ_LAYOUTS[layout], weight_dtype=dtype, granularity=granularity, **more
    )


INT4 = 0.5 + 2.0**-18
BOUNDS: dict[str, tuple[DeclaredScheme, float, float]] = {
    # a code, and how far from it weight / scale may be
    "two roundings": (scheme("quark", "int4"), 3, INT4),
    "a quotient in BF16": (scheme("compressed-tensors", "int4"), -5, INT4 + 2.0**-6),
    "a scale in F16, later": (scheme("awq", "int4", "group"), 3, INT4 + 8 * 2.0**-11),
    "of 2 bits": (scheme("gptq", "int2", "group"), -1, INT4 + 2 * 2.0**-11),
    "of 8 bits": (scheme("gptq", "int8", "group"), 1, 0.5 + 2.0**-14 + 128 * 2.0**-11),
    "asymmetric": (scheme("gptq", "int4", "group", asymmetric=True), 3, INT4 + 16 * 2.0**-11),
    "of 3 bits": (scheme("gptq", "int3", asymmetric=True), 1, INT4 + 8 * 2.0**-11),
}
FLOATS: dict[str, tuple[DeclaredScheme, float, float, float]] = {
    # a code, the weights next to it under a scale of 1 that may have it, and that may not
    "FP8 up": (scheme("quark", "fp8_e4m3"), 16, 17 * (1 + 2.0**-8), 17 * (1 + 2.0**-7)),
    "FP8 down": (scheme("quark", "fp8_e4m3"), 16, 15.45, 15.5 * (1 - 2.0**-7)),
    "FP8, subnormal": (scheme("quark", "fp8_e4m3"), 2.0**-8, 1.496 * 2.0**-9, 1.49 * 2.0**-9),
    "FP8, saturated": (scheme("quark", "fp8_e4m3"), 448, 1e6, 415),
    "FP4": (scheme("quark", "mxfp4", "group"), 4, 5 + 2.0**-20, 5 + 2.0**-18),
    "FP4, halves": (scheme("quark", "mxfp4", "group"), 1, 0.75 - 2.0**-23, 0.75 - 2.0**-20),
    "FP4, saturated": (scheme("quark", "mxfp4", "group"), 6, 100, 4.9),
}


def of_ones(count: int, bits: int = 4) -> Any:
    """A linear of so many rows, whose scales are 1."""
    ones, half = np.ones((count, 1), np.float32), 2.0 ** (bits - 1)
    ends = -half, half - 1
    return SimpleNamespace(
        scale=ones, scale_of=lambda rows: ones[: len(rows)], first_scale=None, ends=lambda *_: ends
    )


def judged(of: DeclaredScheme, codes: Any, x: Any) -> AboutNearest:
    """Weights x under scales of 1, stored as these codes."""
    codes, w = np.atleast_2d(np.array(codes, np.float32)), np.atleast_2d(np.array(x, np.float32))
    judge = AboutNearest(of, of_ones(len(w), of.number.bits), Buffers())
    judge.add(Block(7, w, np.zeros(w.size, np.uint8), lambda: codes))
    return judge


@pytest.mark.parametrize("name", BOUNDS)
def test_an_integer_may_be_this_far_from_its_weight(name: str) -> None:
    of, code, bound = BOUNDS[name]
    for side in (-1, 1):
        inside, outside = (code + side * bound * factor for factor in (1 - 2e-6, 1 + 2e-6))
        assert judged(of, code, inside).faults("a") == []
        assert judged(of, code, code).max_error == 0
        (fault,) = judged(of, [code, code], [inside, outside]).faults("a")
        assert fault.got.startswith(f"1 other(s), worst at row 7, column 1: code {code:g} where")
        assert judged(of, code, inside).max_error == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("name", FLOATS)
def test_a_float_may_be_this_far_from_its_weight(name: str) -> None:
    of, code, inside, outside = FLOATS[name]
    for sign in (-1, 1):
        assert judged(of, sign * code, sign * inside).wrong == 0
        assert judged(of, sign * code, sign * outside).wrong == 1
    nan = judged(of, [code, np.nan, code], [code, code, outside])
    assert nan.wrong == 2
    assert "column 1" in nan.faults("a")[0].got


def test_codes_of_which_some_are_moved_compensate() -> None:
    """Of 200 codes five are one step off: more than a fiftieth; four are damage."""
    of, rng = scheme("quark", "int4"), np.random.default_rng(0)
    w = rng.uniform(-7, 7, (1, 200)).astype(np.float32)
    nearest = np.rint(w)
    for moved, compensated in ((4, False), (5, True), (200, False)):
        codes = nearest.copy()
        codes[:, :moved] += np.where(codes[:, :moved] > 0, -1, 1)
        judge = foreign_judge(of, of_ones(1), Buffers())
        assert isinstance(judge, NearestOrCompensated)
        judge.add(Block(0, w, np.zeros(200, np.uint8), lambda codes=codes: codes))
        assert judge.compensated is compensated
        found = judge.wrong, judge.max_error is None, len(judge.faults("a"))
        assert found == ((0, True, 0) if compensated else (moved, False, 1))


def test_blocks_without_other_codes_do_not_make_up_for_those_with_them() -> None:
    """Errors of three times the nearest are none of GPTQ's, in however few of the rows."""
    judge = foreign_judge(scheme("quark", "int4"), of_ones(2), Buffers())
    w = np.full((1, 64), 0.25, np.float32)
    for row in (0, 1):
        codes = np.full_like(w, row)
        judge.add(Block(row, w, np.zeros(64, np.uint8), lambda codes=codes: codes))
    assert judge.wrong == 64


@pytest.mark.parametrize("byte", [0x08, 0x80])
def test_mxfp4_has_no_negative_zero_in_either_half_of_a_byte(byte: int) -> None:
    judge = Nearest(scheme("quark", "mxfp4", "group"), np.ones((1, 1), np.float32), None, Buffers())
    zeros = np.zeros((1, 2), np.float32)
    judge.add(Block(0, zeros, np.array([byte], np.uint8), lambda: zeros))
    assert judge.wrong == 1


@pytest.mark.parametrize("most", [2.5, 4.0])
def test_codes_that_compensate_have_a_largest_error(most: float) -> None:
    """Relative to that of the nearest, of all rows together and, twice as much, of one."""
    of, ones, linear = scheme("quark", "int4"), np.ones((5, 1), np.float32), of_ones(5)
    for errors, limit, got in (
        ((1, 1), 1, ""),
        ((1.001, 1.001), 1, f"{most * 1.001:.3g} times"),
        ((1.999, 0), 1, f"{(1.999**2 * most**2 / 2) ** 0.5:.3g} times"),
        ((1.3, 0.2), 1, ""),
        ((0, 0, 0, 2, 0), 2, ""),
        ((0, 0, 0, 2.1, 0), 2, f"{most * 2.1:.3g} times in row 3"),
    ):
        # The nearest code is 0, with an error of a quarter.
        w = np.full((len(errors), 64), 0.25, np.float32)
        codes = w + np.array(errors, np.float32)[:, None] * most / 4
        judge = Near(Nearest(of, ones, None, Buffers()), linear, None, Buffers(), most=most)
        judge.add(Block(0, w, np.zeros(w.size, np.uint8), lambda codes=codes: codes))
        expected = f"quantized values with at most {limit * most:g} times the error of the nearest"
        found = [(fault.expected, fault.got) for fault in judge.faults("a")]
        assert found == ([(expected, got)] if got else [])
    exact = np.zeros((2, 64), np.float32)  # the least error of a code is 1/48
    for share, wrong in ((0.99, 0), (1.01, 1)):
        codes = exact + share * most / np.float32(48) ** 0.5
        judge = Near(Nearest(of, ones, None, Buffers()), linear, None, Buffers(), most=most)
        judge.add(Block(0, exact, np.zeros(128, np.uint8), lambda codes=codes: codes))
        assert len(judge.faults("a")) == wrong


def beside(value: float, by: float) -> tuple[float, float]:
    return value - by, value + by


SCALES: dict[str, tuple[DeclaredScheme, str, tuple[float, ...], tuple[float, ...]]] = {
    # dtype of scales; scales that an absmax of 1 may have, and that it may not
    "FP8": (scheme("quark", "fp8_e4m3"), "F32", (1 / 448,), (1.005 / 448, 0.995 / 448)),
    "FP8 in BF16": (scheme("quark", "fp8_e4m3"), "BF16", beside(1 / 448, 2.0**-8 * 0.99 / 448),
                    beside(1 / 448, 2.0**-8 * 1.01 / 448)),
    "FP8 in F16": (scheme("quark", "fp8_e4m3"), "F16",
                   beside(1 / 448, 2.0**-10 * 0.99 / 448 + 2.0**-24),
                   beside(1 / 448, 2.0**-10 * 1.01 / 448 + 2.0**-24)),
    "powers of two": (
        scheme("fp8", "fp8_e4m3", "block", group_size=128, version="ue8m0"), "F32",
        (2.0**-8, 1 / 448), (2.0**-9, 2.0**-7, 2.0**-8 * 1.01),
    ),
    "MXFP4": (
        scheme("quark", "mxfp4", "group", group_size=32), "U8", (1 / 3.51, 1 / 6.99),
        (1 / 3.49, 1 / 7.01),
    ),
    "INT4": (
        scheme("quark", "int4"), "F32", (1 / 7.5, 1 / 7, 1 / 8, 1 / 32, 0.5 / 7),
        (1.01 / 7, 0.99 / 32, 0.5),
    ),
    "INT4, signed": (scheme("gptq", "int4", "group"), "F32", (-1 / 8, 1 / 7), (-0.5, 0.5)),
    "INT4, asymmetric": (
        scheme("gptq", "int4", "group", asymmetric=True), "F32", (1 / 64, 1 / 7),
        (0.99 / 64, 1.01 / 7),
    ),
    "INT8": (
        scheme("gptq", "int8", "group"), "F32", (1 / 127.5, 1 / 127, 1 / 512),
        (1 / 125, 1 / 513),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_may_be_this_far_from_absmax(name: str) -> None:
    of, dtype, right, wrong = SCALES[name]
    suffix = f"a.{of.layout.scale_suffix(of)}"
    output: Any = SimpleNamespace(tensors={suffix: SimpleNamespace(name=suffix, dtype=dtype)})

    def faults(*scale: float, compensated: bool = False, most: float = 1) -> list[str]:
        scales = np.array([scale], np.float32)
        absmax = np.full_like(scales, most)
        found = about_absmax_faults(output, of, "a", scales, absmax, compensated=compensated)
        return [fault.got for fault in found]

    for scale in right:
        assert faults(scale) == [], scale
    for scale in wrong:
        assert faults(scale) == [f"1 other(s), first {abs(np.float32(scale)):.6g} at row 0"], scale
    if of.number.is_integer:
        assert faults(1.4 * right[-1], compensated=True) == []
        assert faults(1.6 * max(map(abs, right)), compensated=True) != []
    if of.number.powers_of_two:  # which has none below
        assert faults(2.0**-127, most=2.0**-127) == []


@pytest.mark.parametrize(
    ("dtype", "slack"), [("BF16", 2.0**-8), ("F16", 2.0**-10), ("F32", 2.0**-8)]
)
def test_scales_unlike_the_others_are_damaged_if_few(dtype: str, slack: float) -> None:
    """Of 16 one; two are an eighth, and may be searched."""
    of = scheme("quark", "int4")
    suffix = f"a.{of.layout.scale_suffix(of)}"
    output: Any = SimpleNamespace(tensors={suffix: SimpleNamespace(name=suffix, dtype=dtype)})

    def faults(scales: Any) -> list[str]:
        sides = scales[None], np.ones((1, 16), np.float32)
        found = about_absmax_faults(output, of, "a", *sides, compensated=False)
        return [fault.expected for fault in found]

    scales = np.full(16, 1 / 7, np.float32)
    for odd in (1 + 0.99 * slack, 1 - 0.99 * slack):
        assert faults(np.append(scales[1:], scales[0] * np.float32(odd))) == []
    for odd in (1 + 1.01 * slack, 1 - 1.01 * slack, 0.5):
        found = faults(np.append(scales[1:], scales[0] * np.float32(odd)))
        assert found == ["absmax / 7 (0.142857)"]
    assert faults(np.append(scales[2:], scales[:2] / 2)) == []


NVFP4 = scheme("modelopt", "nvfp4", "group", group_size=16)
TWO_STAGES = scheme("quark", "int4", first_stage="fp8_e4m3")
STAGES: dict[str, tuple[DeclaredScheme, float, float, tuple[float, ...], tuple[float, ...]]] = {
    # absmax, the scale of the matrix, and scales of a group or row that fit, and that do not
    "NVFP4": (NVFP4, 96, 1, beside(16, 1), beside(16, 1 + 2.0**-15)),
    "NVFP4, subnormal": (NVFP4, 6 * 2.0**-8, 1, beside(2.0**-8, 2.0**-10),
                         beside(2.0**-8, 2.0**-10 + 2.0**-19)),
    "NVFP4, saturated": (NVFP4, 1e6, 1, (448, 420), (419, 477)),
    "NVFP4, of zeros": (NVFP4, 0, 1, (1, 448), ()),
    "two stages": (TWO_STAGES, 33, 2, beside(16 / 7.5, 16 / 7.5 * 0.99 * 2.0**-8),
                   beside(16 / 7.5, 16 / 7.5 * 1.01 * 2.0**-8)),
    "two stages, a tie": (TWO_STAGES, 34, 2, (16 / 7.5, 17 / 7.5, 18 / 7.5),
                          (16 / 7.5 * 0.995, 18 / 7.5 * 1.005)),
}  # fmt: skip


@pytest.mark.parametrize("name", STAGES)
def test_a_scale_below_a_matrix_may_be_this_far(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, most, whole, right, wrong = STAGES[name]
    suffix = f"a.{of.layout.scale_suffix(of)}"
    output: Any = SimpleNamespace(tensors={suffix: SimpleNamespace(name=suffix, dtype="F32")})
    monkeypatch.setattr(foreign_rules, "global_scale", lambda *_: np.float32(whole))
    for scale in (*right, *wrong):
        stored = np.full((1, 1), scale, np.float32)
        monkeypatch.setattr(foreign_rules, "stored_scales", lambda *_, stored=stored: stored)
        absmax = np.full((1, 1), most, np.float32)
        faults = about_absmax_faults(output, of, "a", stored * whole, absmax, compensated=False)
        assert len(faults) == (scale in wrong), scale
