"""Does an engine's linear compute what the folder says? Its outputs against x W^T, decoded here.

How far an output may be off. Let y be the exact product of the row x, its inputs rounded as
declared, and the decoded row w, and a = sqrt(sum_i x_i^2 w_i^2): what |y| is on average, as signs
of x are random. Errors are relative to a; that of a row is the root of their mean square over
outputs. With u = 2^-8, half a step of BF16 (2^-11 of float16):

- the result is rounded to 16 bits: at most u;
- weights, which are codes times scale, and scales themselves may be rounded to 16 bits: each w_i is
  off by at most u w_i twice; the errors of different inputs do not add up but in their squares, for
  signs of x are random: at most 2 u;
- sums may be kept in 16 bits between blocks of inputs. After p of P blocks the sum is sqrt(p/P) a,
  and is rounded by at most u of that: together u sqrt(sum_p p/P) <= u sqrt((P + 1) / 2), which is
  at most 2 u up to P = 7; kernels take larger sums in float32;
- inputs may be rounded by another order of operations, or not at all, which is nearer to the truth:
  both are within r, what the declared rounding changes in the row's product.

So the error of a row is at most 5 u + r. One output has 16 rows only; the mean square of 16 sums of
many independent errors exceeds nine times its expectation with a chance below 10^-15: the error of
an output may be three times as large, each row in units of its bound.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..drafts import Row
from ..stored.linear import decoded_blocks
from ..stored.loading import CPU, input_scale
from ..stored.online_rounding import STATIC, InputRounding
from ..stored.stored_draft import StoredDraft

NUM_ROWS = 16
_OUTLIER = 64.0
_ROUNDINGS = 5
_ONE_OUTPUT = 3.0
_HALF_STEP = {"torch.float16": 2.0**-11}
_SEED, _TINY = 65, 1e-30
_NO_NUMBER = 1e6
"""The error of an output that is missing, infinite or NaN."""


def random_inputs(width: int) -> Tensor:
    """[NUM_ROWS, width] BF16 from N(0, 1); the first row has one outlier."""
    x = torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(_SEED + width))
    x[0, width // 3] = _OUTLIER
    return x.bfloat16()


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedLinear:
    """One quantized linear of the folder in the engine.

    Attributes:
        module: of the engine. part: of the folder. kernel: classes of the engine.
        format: how it is stored.
        error: of the row that is worst in units of its bound. bound: what it may be.
        worst: that of the worst output, in units of the bounds; at most 3 is rounding.
        output: which that is.
        cause: what explains an error beyond the bound; None where none is, or nothing explains it.
    """

    module: str
    part: str
    kernel: str
    format: str
    error: float
    bound: float
    worst: float
    output: int
    cause: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether all of the errors is rounding."""
        return self.error <= self.bound and self.worst <= _ONE_OUTPUT

    @property
    def sentence(self) -> str:
        """What is wrong, in words."""
        what = f"an error of {self.error:.1%}, of which at most {self.bound:.1%} is rounding"
        if self.error <= self.bound:
            what = f"an error of {self.worst:.1f} times the bound in output {self.output}"
        cause = f": {self.cause}" if self.cause else ""
        return f"{self.module} computes {self.part} with {what}{cause}"


def judge(
    stored: StoredDraft, lines: Sequence[Mapping[str, Any]], outputs: Mapping[str, Tensor]
) -> Iterator[AskedLinear]:
    """Compare the outputs of each module with the parts of the folder that fill it, in order.

    `lines`: module, parts, kernel and dtype.
    """
    rows = {row.module: row for row in stored.draft.rows if stored.is_quantized(row)}
    for line in lines:
        y, first = outputs[line["module"]], 0
        parts = [_Part(stored, rows[name]) for name in line["parts"]]
        u = _HALF_STEP.get(line["dtype"], 2.0**-8)
        for part in parts:
            size = part.row.tensor.shape[0]
            own = y[:, first : first + size]
            first += size
            found = part.judged(own, u, line)
            if not found.is_right:
                found = replace(found, cause=_cause(part, own, found.bound, parts))
            yield found


class _Part:
    """One linear of the folder with its inputs as its kernel reads them."""

    def __init__(self, stored: StoredDraft, row: Row) -> None:
        self.row, self.scheme, self.linear = row, stored.needed_scheme(row), stored.linear(row)
        how, name = self.scheme.activations, row.module
        scales = {name: input_scale(stored, row, how, CPU)} if how in STATIC else {}
        self.given = random_inputs(row.tensor.shape[1]).float()
        self.x = InputRounding({name: how}, scales, None)(name, self.given)

    def weight(self, rows: range | None = None) -> Tensor:
        """[rows, inputs] float32."""
        return torch.from_numpy(self.linear.decoded(rows).dequantized())

    def judged(self, y: Tensor, u: float, line: Mapping[str, Any]) -> AskedLinear:
        """Its outputs [rows, outputs] against the folder; outputs that are missing are NaN."""
        errors, changes = [], []
        for rows in decoded_blocks(self.row.tensor):
            weight = self.weight(rows)
            usual = (self.x.square() @ weight.T.square()).sqrt().clamp(min=_TINY)
            got = torch.full_like(usual, math.nan)
            own = y[:, rows.start : rows.stop]
            got[:, : own.shape[1]] = own
            found = (got - self.x @ weight.T) / usual
            errors.append(torch.where(found.isfinite(), found, _NO_NUMBER))
            changes.append((self.x - self.given) @ weight.T / usual)
        error, bound = torch.cat(errors, 1), _ROUNDINGS * u + _size(torch.cat(changes, 1), 1)
        by_row, by_output = _size(error, 1), _size(error / bound[:, None], 0)
        row, output = int((by_row / bound).argmax()), int(by_output.argmax())
        return AskedLinear(
            module=line["module"],
            part=self.row.module,
            kernel=line["kernel"],
            format=str(replace(self.scheme, others=(), excludes=(), kv_cache=None)),
            error=float(by_row[row]),
            bound=float(bound[row]),
            worst=float(by_output[output]),
            output=output,
        )


def _size(errors: Tensor, dim: int) -> Tensor:
    return errors.square().mean(dim).sqrt()


def _cause(part: _Part, y: Tensor, bound: float, parts: Sequence[_Part]) -> str | None:
    """The first mistake that gives these outputs."""
    if not y.isfinite().all():
        return "outputs are not finite"
    if not y.any():
        return "all outputs are 0"
    if y.shape[1] != part.row.tensor.shape[0]:
        return f"there are {y.shape[1]} outputs, not {part.row.tensor.shape[0]}"
    weight = part.weight()
    for said, other in _mistakes(part, weight, parts):
        power = round(math.log2(max(_gain(y, other), _TINY)))
        if said and _distance(y, other) <= bound:
            return said
        if power and _distance(y, other * 2.0**power) <= bound:
            return f"every scale is taken times 2^{power:+d}" + (said and f"; {said}")
    product = part.x @ weight.T
    gain = _gain(y, product)
    if abs(gain - 1) > bound and _distance(y, product * gain) <= bound:
        return f"outputs are {gain:.3g} times what they should be"
    return None


def _gain(y: Tensor, of: Tensor) -> float:
    return float((y * of).sum() / of.square().sum().clamp(min=_TINY))


def _mistakes(part: _Part, weight: Tensor, parts: Sequence[_Part]) -> Iterator[tuple[str, Tensor]]:
    """What was done instead, and the product that it gives."""
    x, width = part.x, weight.shape[1]
    yield "", x @ weight.T
    yield "inputs are rounded to INT8, which is not declared", _int8(part.given) @ weight.T
    for said, order in (
        ("the two values of each byte are swapped", [1, 0]),
        ("the nibbles of each word are in another order", [0, 2, 4, 6, 1, 3, 5, 7]),
        ("the nibbles of each word are in another order", [0, 4, 1, 5, 2, 6, 3, 7]),
    ):
        if width % len(order) == 0:
            moved = torch.arange(width).reshape(-1, len(order))[:, order].reshape(-1)
            yield said, x @ weight[:, moved].T
    if weight.shape[0] == width:
        yield "the weight is transposed", x @ weight
    decoded = part.linear.decoded()
    codes = torch.from_numpy(decoded.codes)
    yield "the scales are not applied", x @ codes.T
    for other in parts:
        if other is not part and other.linear.scale.shape == part.linear.scale.shape:
            theirs = replace(decoded, scale=other.linear.decoded().scale)
            name = other.row.module.rpartition(".")[2]
            yield f"the scales of {name} are taken", x @ torch.from_numpy(theirs.dequantized()).T
            if other.row.tensor.shape == part.row.tensor.shape:
                yield f"it is computed with {name}", x @ other.weight().T


def _int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def _distance(y: Tensor, of: Tensor) -> float:
    """Relative, by rows: the one with the outlier counts as every other."""
    size = of.square().mean(1, keepdim=True).clamp(min=_TINY)
    return float(((y - of).square() / size).mean().sqrt())
