"""What kernels see of inputs, rounded to FP8, NVFP4 or MXFP4 and back; and heads quantized online.

vLLM 0.33 quantizes a head while it loads a draft (`draft_lm_head_quantization`): a copy of the
target's head that the draft shares, each process its own rows; with a draft that has a head of its
own it refuses to start. The folder shows nothing of it; the values of that head are
computed here in vLLM's order of operations.

Source: `layers/quantization/online/lm_head.py`, `online/fp8.py`, `config/speculative.py:1953` and
`v1/worker/gpu/spec_decode/eagle/utils.py` of vLLM 0.33. SGLang 0.5.23 has no such option.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ...recipes.errors import CheckpointError
from ...recipes.formats import NUMBER_FORMATS, OnlineHead
from ..drafts import Draft, Row
from ..drafts.forward import OnInput
from .layouts.scheme import GROUPS, INVERTED, Activations
from .stored_draft import StoredDraft
from .stored_tables import HEAD

FP8_MAX = NUMBER_FORMATS["fp8_e4m3"].largest
(FP8_GROUP,) = NUMBER_FORMATS["fp8_e4m3"].sizes["block"]  # inputs that share a scale, with blocks
_FP8_GROUPS: Mapping[str, int] = {"group-dynamic": FP8_GROUP, "group-dynamic-64": 64}
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_MAX = FP4_VALUES[-1]
STATIC: tuple[str, ...] = ("tensor-static", *INVERTED)
"""Activations with a stored scale, without which they cannot be rounded."""


def kernel_scale(how: Activations, scale: Tensor) -> Tensor:
    """The static scale of a linear's input, in the form that `InputRounding` takes."""
    return 1 / scale if how in INVERTED else scale


class InputRounding:
    """`OnInput` that rounds the inputs of quantized linears and leaves others unchanged.

    Its result is exactly a code times its scale, in float32 or wider: kernels multiply codes and
    scale their sums. Gradients go straight through, as if nothing were rounded.

    Args:
        activations: canonical module name of every quantized linear -> what is declared for it.
        scales: canonical module name -> the static scale of its input, [] float32, as in kernels.
        before: sees every input first; its result is used instead.
    """

    def __init__(
        self,
        activations: Mapping[str, Activations],
        scales: Mapping[str, Tensor],
        before: OnInput | None,
    ) -> None:
        self._activations, self._scales, self._before = activations, scales, before

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """The input `x` of the linear `name` as its kernel reads it."""
        if self._before is not None:
            x = self._before(name, x)
        how = self._activations.get(name, "none")
        if how == "none":
            return x
        rounded = self._rounded(how, x.detach().to(torch.float32), name)
        rounded = rounded.to(torch.promote_types(x.dtype, torch.float32))
        return rounded + (x - x.detach()) if x.requires_grad else rounded

    def _rounded(self, how: Activations, x: Tensor, name: str) -> Tensor:
        if how == "tensor-static":
            return _fp8(x, self._scales[name])
        if how in INVERTED:
            return _in_groups(x, GROUPS[how], lambda groups: _nvfp4(groups, self._scales[name]))
        if how in GROUPS:
            return _in_groups(x, GROUPS[how], _mxfp4)
        if how in _FP8_GROUPS:
            return _in_groups(x, _FP8_GROUPS[how], lambda groups: _fp8(groups, _fp8_scale(groups)))
        if how == "tensor-dynamic":  # one scale for all tokens of a call
            return _fp8(x, _fp8_scale(x.reshape(1, -1)).reshape(()))
        return _fp8(x, _fp8_scale(x))


def _in_groups(x: Tensor, size: int, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply to [..., groups, size]; the last group may be padded with zeros."""
    padding = -x.shape[-1] % size
    wide = torch.nn.functional.pad(x, (0, padding))
    return rounded(wide.reshape(*x.shape[:-1], -1, size)).flatten(-2)[..., : x.shape[-1]]


def _over(x: Tensor, divisor: float) -> Tensor:
    """The quotient rounded once; for a plain number a GPU would multiply by its reciprocal."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def _fp8_scale(x: Tensor) -> Tensor:
    absmax = x.abs().amax(-1, keepdim=True)
    return torch.where(absmax > 0, _over(absmax, FP8_MAX), 1.0)  # a zero token stays zero


def _fp8(x: Tensor, scale: Tensor) -> Tensor:
    codes = (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.to(torch.float32) * scale


def _nvfp4(groups: Tensor, inverse: Tensor) -> Tensor:
    """Groups of 16 under e4m3(inverse * absmax / 6) / inverse; zero where E4M3 rounds that to zero.

    Uses the order of operations of kernels, and of compressed-tensors 0.20: equal bit for bit.
    """
    absmax = groups.abs().amax(-1, keepdim=True)
    scale = (inverse * _over(absmax, FP4_MAX)).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    scale = scale.to(torch.float32) / inverse
    return _fp4(groups / torch.where(scale > 0, scale, 1.0)) * scale


def _mxfp4(groups: Tensor) -> Tensor:
    """Groups of 32 under 2^(floor(log2(absmax)) - 2), absmax rounded to one bit of mantissa."""
    absmax = groups.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(absmax)  # absmax = mantissa * 2^exponent, mantissa in [.5, 1)
    exponent = exponent - 1 + (mantissa >= 0.875) - 2
    scale = (exponent.clamp(-126, 127) + 127 << 23).to(torch.int32).view(torch.float32)
    return _fp4(groups / scale) * scale


def _fp4(x: Tensor) -> Tensor:
    """Nearest of the 16 values, ties to the even mantissa, saturating at 6.

    They are 1/2 apart up to 2, 1 up to 4, then 2; mantissas are even at even multiples of these.
    """
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return size.div_(step).round_().mul_(step).clamp_(max=FP4_MAX).copysign_(x)


ONLINE_ACTIVATIONS: Mapping[OnlineHead, Activations] = {"fp8": "token-dynamic", "nvfp4": "none"}
"""How the head's inputs are rounded: FP8 multiplies in FP8, NVFP4 is weight-only."""
_GROUP = GROUPS["nvfp4"]
_SMALLEST_FP8_SCALE = 1 / (FP8_MAX * 512)  # `_fp8_channel_scale`
_SMALLEST_GLOBAL_SCALE = 1e-12
_NO_RECIPROCAL_OF_ZERO = 1e8
_ROWS = 8192  # quantized at a time; rows are independent, except for the global scale
_INSTEAD = (
    "leave --head-online out; a head of the draft's own is quantized in the folder: 'draftquant"
    " quantize' with a recipe that has a rule for the role 'head'"
)


def online_heads(
    stored: StoredDraft,
    weights: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    how: OnlineHead | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The heads of a draft as vLLM serves them with this option, dequantized; none without it.

    `weights` are the draft's by canonical name, `shared` the target's tables. CheckpointError where
    vLLM refuses the option for this draft, or where that cannot be known.
    """
    if how is None:
        return {}
    draft = stored.draft
    _check_method(draft, how)
    heads = [row for row in draft.rows if row.role == "head"]
    for row in heads:
        scheme = stored.scheme_of(row)
        if scheme is not None:
            what = f"{row.module} is stored quantized already, in {scheme.number.bits} bits"
            raise _not_shared(draft, how, what)
    if HEAD not in shared:
        what = "vLLM quantizes a copy of the target's head, and nothing here shows that head"
        fix = "give the target (--target M), or traces recorded with --tables"
        raise _refused(draft, how, what, fix)
    head = shared[HEAD]
    if head.dtype not in (torch.bfloat16, torch.float16):
        head = head.to(torch.bfloat16)
    for row in heads:
        _check_shared(draft, row, weights[row.canonical], head, how)
    exact = ONLINE_ACTIVATIONS[how] != "none"
    held = torch.promote_types(dtype, torch.float32) if exact else dtype
    served = quantized_head(head, how).to(held)
    return dict.fromkeys([row.canonical for row in heads] or [HEAD], served)


def quantized_head(head: Tensor, how: OnlineHead) -> Tensor:
    """What a 16-bit head [vocabulary, W] becomes, as quantized values times scales, float32.

    On a GPU torch divides by 2688 by multiplying by its reciprocal: there NVFP4's global scale
    may differ in its last bit.
    """
    served = torch.empty(head.shape, dtype=torch.float32, device=head.device)
    lowest, highest = head.aminmax()
    largest = torch.maximum(lowest.abs(), highest.abs()).float()
    whole = (largest / (FP4_MAX * FP8_MAX)).clamp(min=_SMALLEST_GLOBAL_SCALE)
    for at in _blocks(len(head)):
        served[at] = _fp8_rows(head[at]) if how == "fp8" else _nvfp4_rows(head[at], whole)
    return served


def _fp8_rows(rows: Tensor) -> Tensor:
    """`Fp8PtpcOnlineLinearMethod`: scale = absmax / 448, the divisor of the weights."""
    scale = _over(rows.abs().amax(-1, keepdim=True).float(), FP8_MAX)
    scale = scale.clamp_min(_SMALLEST_FP8_SCALE)
    return _fp8(rows.float(), scale)


def _nvfp4_rows(rows: Tensor, whole: Tensor) -> Tensor:
    """`_quantize_nvfp4` by `ref_nvfp4_quant`: a group is multiplied by the inverse of its scale."""
    groups = rows.float().reshape(len(rows), -1, _GROUP)
    inverse = 1 / whole
    scale = inverse * (groups.abs().amax(-1, keepdim=True) * (1 / FP4_MAX))
    scale = scale.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    factor = _reciprocal(scale * _reciprocal(inverse))
    return (_fp4(groups * factor) * (scale * whole)).reshape(rows.shape)


def _reciprocal(x: Tensor) -> Tensor:
    return 1 / (x + (x == 0) * _NO_RECIPROCAL_OF_ZERO)


def _blocks(rows: int) -> Iterator[slice]:
    return (slice(first, min(first + _ROWS, rows)) for first in range(0, rows, _ROWS))


def _check_method(draft: Draft, how: OnlineHead) -> None:
    vllm = draft.family.engine_traits.vllm
    if not vllm.architectures | vllm.not_executed:
        raise _refused(draft, how, f"vLLM 0.33 serves no {draft.family.name} drafts")
    if not vllm.takes_online_heads:
        what = "vLLM 0.33 refuses it: draft_lm_head_quantization is not supported for method"
        served = f"{vllm.served_as!r}, by which it serves {draft.family.name} drafts"
        raise _refused(draft, how, f"{what} {served}")
    if vllm.mtp is not None and vllm.mtp.own_heads:
        raise _not_shared(draft, how, "the modules have heads of their own")
    width = draft.geometry.hidden_size
    if how == "nvfp4" and width % _GROUP:
        what = f"NVFP4 has groups of {_GROUP} inputs, and the head has {width}"
        raise _refused(draft, how, what, fix="use --head-online fp8, or leave it out")


def _check_shared(draft: Draft, row: Row, stored: Tensor, head: Tensor, how: OnlineHead) -> None:
    """`_should_share`: of equal shape, and equal in every weight."""
    if stored.shape != head.shape:
        what = f"{row.module} is {list(stored.shape)}, the target's head {list(head.shape)}"
        raise _not_shared(draft, how, what)
    for at in _blocks(len(head)):
        different = (stored[at].to(head.dtype) != head[at]).any(-1)
        if different.any():
            row_number = at.start + int(different.int().argmax())
            what = f"row {row_number} of {row.module} differs from that of the target's head"
            raise _not_shared(draft, how, what)


def _not_shared(draft: Draft, how: OnlineHead, what: str) -> CheckpointError:
    only = (
        "and vLLM 0.33 quantizes only a head that the draft shares with the target:"
        " 'draft_lm_head_quantization needs a drafter that shares the target lm_head'"
    )
    return _refused(draft, how, f"{what}, {only}")


def _refused(draft: Draft, how: OnlineHead, what: str, fix: str = _INSTEAD) -> CheckpointError:
    return CheckpointError(f"--head-online {how}, {draft.checkpoint.folder.name}", what, fix=fix)
