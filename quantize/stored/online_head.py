"""Heads that vLLM 0.33 quantizes while it loads a draft: `draft_lm_head_quantization`.

A copy of the target's head that the draft shares is quantized, on each process its own rows: for a
draft with a head of its own vLLM refuses to start. Nothing of it stands in a folder; what such a
head multiplies by is computed here in vLLM's order of operations.

Source: `layers/quantization/online/lm_head.py`, `online/fp8.py`, `config/speculative.py:1953` and
`v1/worker/gpu/spec_decode/eagle/utils.py` of vLLM 0.33. SGLang 0.5.23 has no such option.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...recipes.formats import OnlineHead
from ..drafts import Draft, Row
from ..errors import CheckpointError
from .activations import FP4_MAX, FP8_MAX
from .layouts.scheme import GROUPS, Activations
from .stored_draft import StoredDraft
from .table_names import HEAD

ONLINE_ACTIVATIONS: Mapping[OnlineHead, Activations] = {"fp8": "token-dynamic", "nvfp4": "none"}
"""How the head's inputs are rounded: FP8 multiplies in FP8, NVFP4 is weight-only."""
_GROUP = GROUPS["nvfp4"]
_SMALLEST_FP8_SCALE = 1 / (FP8_MAX * 512)  # `_fp8_channel_scale`
_SMALLEST_GLOBAL_SCALE = 1e-12
_NO_RECIPROCAL_OF_ZERO = 1e8
_ROWS = 8192  # quantized at a time; no row depends on another, but for the global scale
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

    Args:
        weights: of the draft as it is loaded, by canonical name.
        shared: the target's tables, see `load_draft`.
        how: the value of `draft_lm_head_quantization`.
        dtype: of the computation. What multiplies rounded inputs is float32 at least, see
            `held_dtype`.

    Raises:
        CheckpointError: vLLM refuses the option for this draft, or nothing shows whether it does.
    """
    if how is None:
        return {}
    draft = stored.draft
    _check_method(draft, how)
    own = [row for row in draft.rows if row.role == "head"]
    for row in own:
        _check_not_quantized(stored, row, how)
    if HEAD not in shared:
        raise CheckpointError(
            _where(draft, how),
            "vLLM quantizes a copy of the target's head, and nothing here shows that head",
            fix="give the target (--target M), or traces recorded with --tables",
        )
    head = _as_served(shared[HEAD])
    for row in own:
        _check_shared(draft, row, weights[row.canonical], head, how)
    exact = ONLINE_ACTIVATIONS[how] != "none"
    held = torch.promote_types(dtype, torch.float32) if exact else dtype
    served = quantized_head(head, how).to(held)
    return dict.fromkeys([row.canonical for row in own] or [HEAD], served)


def quantized_head(head: Tensor, how: OnlineHead) -> Tensor:
    """What a 16-bit head becomes, as quantized values times their scales.

    Padding rows of vLLM's vocabulary are zeros, and change nothing. On a GPU torch divides by 2688
    by multiplying with its reciprocal: there NVFP4's global scale, one number of which all others
    are multiples, may differ in its last bit.

    Args:
        head: [vocabulary, W] bfloat16 or float16, finite.
        how: "fp8" has one scale per row, "nvfp4" one per 16 inputs under one of the whole matrix.

    Returns:
        [vocabulary, W] float32.
    """
    served = torch.empty(head.shape, dtype=torch.float32, device=head.device)
    lowest, highest = head.aminmax()
    largest = torch.maximum(lowest.abs(), highest.abs()).float()
    whole = (largest / (FP4_MAX * FP8_MAX)).clamp(min=_SMALLEST_GLOBAL_SCALE)
    for at in _blocks(len(head)):
        served[at] = _fp8_rows(head[at]) if how == "fp8" else _nvfp4_rows(head[at], whole)
    return served


def _fp8_rows(rows: Tensor) -> Tensor:
    """`Fp8PtpcOnlineLinearMethod`: scale = absmax / 448, which the weights are divided by."""
    divisor = torch.full((), FP8_MAX, dtype=torch.float32, device=rows.device)
    scale = rows.abs().amax(-1, keepdim=True).float() / divisor
    scale = scale.clamp_min(_SMALLEST_FP8_SCALE)
    values = (rows.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.float() * scale


def _nvfp4_rows(rows: Tensor, whole: Tensor) -> Tensor:
    """`_quantize_nvfp4` by `ref_nvfp4_quant`: a group is multiplied by the inverse of its scale.

    A scale that E4M3 rounds to zero makes its group zero.
    """
    groups = rows.float().reshape(len(rows), -1, _GROUP)
    inverse = 1 / whole
    scale = inverse * (groups.abs().amax(-1, keepdim=True) * (1 / FP4_MAX))
    scale = scale.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    factor = _reciprocal(scale * _reciprocal(inverse))
    values = _nearest_fp4((groups * factor).clamp(-FP4_MAX, FP4_MAX))
    return (values * (scale * whole)).reshape(rows.shape)


def _reciprocal(x: Tensor) -> Tensor:
    return 1 / (x + (x == 0) * _NO_RECIPROCAL_OF_ZERO)


def _nearest_fp4(x: Tensor) -> Tensor:
    """Nearest of the values of FP4, ties to the even mantissa: `cast_to_fp4`."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (size / step).round() * step * x.sign()


def _blocks(rows: int) -> Iterator[slice]:
    return (slice(first, min(first + _ROWS, rows)) for first in range(0, rows, _ROWS))


def _as_served(head: Tensor) -> Tensor:
    """In the 16 bits in which vLLM serves a target."""
    return head if head.dtype in (torch.bfloat16, torch.float16) else head.to(torch.bfloat16)


def _check_method(draft: Draft, how: OnlineHead) -> None:
    traits = draft.family.engine_traits
    method = traits.vllm.served_as
    known = traits.vllm.architectures | traits.vllm.not_executed
    if not known:
        raise CheckpointError(
            _where(draft, how), f"vLLM 0.33 serves no {draft.family.name} drafts", fix=_INSTEAD
        )
    if not traits.vllm.takes_online_heads:
        raise CheckpointError(
            _where(draft, how),
            f"vLLM 0.33 refuses it: draft_lm_head_quantization is not supported for method"
            f" {method!r}, by which it serves {draft.family.name} drafts",
            fix=_INSTEAD,
        )
    own_heads = traits.vllm.mtp is not None and traits.vllm.mtp.own_heads
    if own_heads:
        raise _not_shared(draft, how, "the modules have heads of their own")
    if how == "nvfp4" and draft.geometry.hidden_size % _GROUP:
        raise CheckpointError(
            _where(draft, how),
            f"NVFP4 has groups of {_GROUP} inputs, and the head has {draft.geometry.hidden_size}",
            fix="use --head-online fp8, or leave it out",
        )


def _check_not_quantized(stored: StoredDraft, row: Row, how: OnlineHead) -> None:
    scheme = stored.scheme_of(row)
    if scheme is not None:
        what = f"{row.module} is stored quantized already, in {scheme.number.bits} bits"
        raise _not_shared(stored.draft, how, what)


def _check_shared(draft: Draft, row: Row, own: Tensor, head: Tensor, how: OnlineHead) -> None:
    """`_should_share`: of equal shape, and equal in every weight."""
    if own.shape != head.shape:
        what = f"{row.module} is {list(own.shape)}, the target's head {list(head.shape)}"
        raise _not_shared(draft, how, what)
    for at in _blocks(len(head)):
        different = (own[at].to(head.dtype) != head[at]).any(-1)
        if different.any():
            row_number = at.start + int(different.int().argmax())
            what = f"row {row_number} of {row.module} differs from that of the target's head"
            raise _not_shared(draft, how, what)


def _not_shared(draft: Draft, how: OnlineHead, what: str) -> CheckpointError:
    return CheckpointError(
        _where(draft, how),
        f"{what}, and vLLM 0.33 quantizes only a head that the draft shares with the target:"
        " 'draft_lm_head_quantization needs a drafter that shares the target lm_head'",
        fix=_INSTEAD,
    )


def _where(draft: Draft, how: OnlineHead) -> str:
    return f"--head-online {how}, {draft.checkpoint.folder.name}"
