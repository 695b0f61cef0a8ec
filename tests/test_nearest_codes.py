"""`verify` on single codes: the nearest are found by looking at every value of the format.

Blocks are judged as the bytes that are stored, so that whatever the judge takes as known is tested.
"""

from typing import Any

import numpy as np
import pytest
from draftquant.quantize.stored.decoded_numbers import E2M1, E4M3, Bytes, Floats, decoded_codes
from draftquant.quantize.stored.layouts import LAYOUTS
from draftquant.quantize.stored.layouts.scheme import DeclaredScheme
from draftquant.quantize.verify.code_judges import Block, Buffers, Nearest

ROWS, COLUMNS = 12, 64
COLUMN_OF_NIBBLE = {"order": range(8), "reorder": (0, 2, 4, 6, 1, 3, 5, 7)}


def scheme(layout: Any, dtype: Any, granularity: Any, **more: Any) -> DeclaredScheme:
    return DeclaredScheme(
        layout=LAYOUTS[layout], weight_dtype=dtype, granularity=granularity, activations="none",
        **{"pack_method": None} | more,
    )  # fmt: skip


CASES = {
    "int4": scheme("compressed-tensors", "int4", "channel", pack_method="order"),
    "int4-group": scheme("compressed-tensors", "int4", "group", pack_method="order", group_size=32),
    "int4-quark": scheme("quark", "int4", "channel", pack_method="reorder"),
    "fp8": scheme("compressed-tensors", "fp8_e4m3", "channel"),
    "fp8-matrix": scheme("modelopt", "fp8_e4m3", "tensor"),
    "nvfp4": scheme("modelopt", "nvfp4", "group", group_size=16),
    "mxfp4": scheme("quark", "mxfp4", "group", group_size=32),
}


def weight(largest: float) -> Floats:
    """Of bfloat16: random, all steps and half steps of small numbers, zeros of both signs."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    w[1, :] = np.arange(COLUMNS) / 8 - 4  # ties, under scales that are powers of two
    w[2, :] = np.float32(2.0**-9) * (np.arange(COLUMNS) / 2 - 16)
    w[3, ::2], w[3, 1::2] = 0, -0.0
    w[4, 0], w[4, 1], w[4, 2] = largest * 2, -largest * 2, -1e-30
    w[5] = 0
    return (w.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def nearest_bytes(case: DeclaredScheme, quotient: Floats, w: Floats) -> Bytes:
    """Codes as bytes, one each, by distance in float64; of two as near the even one."""
    number = case.number
    values = E4M3 if number.is_fp8 else E2M1
    if number.is_integer:
        values = np.array([*range(8), *range(-8, 0)], np.float32)
    known = np.where(np.isnan(values), np.inf, values).astype(np.float64)
    away = np.abs(quotient.astype(np.float64)[..., None] - known)
    order = np.argsort(np.arange(len(values)) % 2, kind="stable")  # even codes first
    codes = order[away[..., order].argmin(axis=-1)].astype(np.uint8)
    zero = known[codes] == 0
    if number.is_fp8:
        return np.where(zero, np.where(np.signbit(w), 0x80, 0), codes).astype(np.uint8)
    sign = 0 if number.is_integer or number.powers_of_two else np.where(w < 0, 8, 0)
    return np.where(zero, sign, codes).astype(np.uint8)


def stored_bytes(case: DeclaredScheme, codes: Bytes) -> Bytes:
    """As the layout packs them."""
    if case.number.is_fp8:
        return codes.reshape(-1)
    if case.number.is_fp4:
        return (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1)
    nibbles = (codes ^ case.layout.nibble_offset).reshape(ROWS, -1, 8).astype(np.uint32)
    words = np.zeros(nibbles.shape[:2], np.uint32)
    for nibble, column in enumerate(COLUMN_OF_NIBBLE[str(case.pack_method)]):
        words |= nibbles[..., column] << np.uint32(4 * nibble)
    return words.view(np.uint8).reshape(-1)


def scales(case: DeclaredScheme) -> Floats:
    """Rounded and powers of two, so that there are ties."""
    shape = {"tensor": (1, 1), "channel": (ROWS, 1)}.get(
        case.granularity, (ROWS, COLUMNS // (case.group_size or 1))
    )
    rough = np.random.default_rng(1).uniform(0.2, 0.6, shape).astype(np.float32)
    rough[::2] = 0.25
    return np.full_like(rough, 0.5) if case.number.powers_of_two else rough


def judged(case: DeclaredScheme, w: Floats, codes: Bytes) -> Nearest:
    """All rows in two blocks, the second one shorter."""
    buffers, stored = Buffers(), stored_bytes(case, codes).reshape(ROWS, -1)
    judge = Nearest(case, scales(case), None, buffers)
    for rows in (slice(0, 7), slice(7, ROWS)):
        block = np.ascontiguousarray(stored[rows])

        def decode(block: Bytes = block) -> Floats:
            return decoded_codes(block, case, None)

        judge.add(Block(rows.start, w[rows].copy(), block.reshape(-1), decode))
    return judge


def right_codes(case: DeclaredScheme, w: Floats) -> Bytes:
    scale = np.repeat(scales(case), case.group_size or 1, axis=1)
    quotient = w * (np.float32(1) / scale) if case.number.is_integer else w / scale
    return nearest_bytes(case, quotient, w)


@pytest.mark.parametrize("name", CASES)
def test_the_nearest_are_right_and_any_other_is_named(name: str) -> None:
    """Every single code, at the ends of rows and blocks too; every other value of the format."""
    case = CASES[name]
    w = weight(448 if case.number.is_fp8 else 6)
    codes = right_codes(case, w)
    assert judged(case, w, codes).faults("w") == []
    rng = np.random.default_rng(2)
    places = [(0, 0), (0, 63), (6, 63), (7, 0), (11, 0), (11, 63), (3, 0), (3, 1), (4, 0), (5, 9)]
    places += [(int(rng.integers(ROWS)), int(rng.integers(COLUMNS))) for _ in range(20)]
    for place in places:
        for other in (codes[place] ^ 1, codes[place] ^ (128 if case.number.is_fp8 else 8), 0x7F):
            changed = codes.copy()
            changed[place] = other & (255 if case.number.is_fp8 else 15)
            if changed[place] == codes[place]:
                continue
            judge = judged(case, w, changed)
            assert judge.wrong == 1, (place, other)
            (fault,) = judge.faults("w")
            assert f"1 other(s), first at row {place[0]}, column {place[1]}:" in fault.got


@pytest.mark.parametrize("name", ["int4", "int4-group", "int4-quark", "nvfp4", "mxfp4"])
def test_no_code_is_the_nearest_to_what_is_no_number(name: str) -> None:
    case = CASES[name]
    w = weight(6)
    codes = right_codes(case, w)
    w[8, 3], codes[8, 3] = np.nan, 0
    assert judged(case, w, codes).wrong == 1
