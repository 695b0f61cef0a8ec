"""Forward maths of a mixture of experts: which experts see a token, and with which weight."""

import torch
from torch import Tensor

from ...forward import Modules, gated_mlp
from ...maths import linear
from .names import Mixture

_EPSILON = 1e-20
"""Added to the sum that weights are divided by, as engines and transformers do."""


def routed(
    mixture: Mixture, x: Tensor, router: Tensor, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, in float32 or wider.

    s = sigmoid(router x); experts are the largest of s + correction within the groups whose two
    largest s + correction sum to most; weights are their s, divided by their sum, times a constant.

    Args:
        x: [N, W].
        router: [E, W].
        correction: [E], None = 0.

    Returns:
        Experts [N, k] int64 and weights [N, k].
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = linear(x.to(wide), router.to(wide))
    scores = logits.sigmoid() if mixture.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if correction is None else scores + correction.to(wide)
    if mixture.num_groups > 1:
        groups = choice.view(len(choice), mixture.num_groups, -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(mixture.groups_per_token).indices
        open_groups = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = groups.masked_fill(~open_groups[..., None], float("-inf")).flatten(-2)
    experts = choice.topk(mixture.per_token).indices
    weights = scores.gather(-1, experts)
    if mixture.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + _EPSILON)
    return experts, weights * mixture.scale


def mixture_mlp(
    mixture: Mixture,
    prefix: str,
    x: Tensor,
    modules: Modules,
    router: Tensor,
    correction: Tensor | None,
) -> Tensor:
    """The sum of a token's experts by weight, and of the shared one.

    Args:
        prefix: of its modules, "layers.0.mlp.".
        x: [..., W].
        modules: the experts' linears; one sees the tokens that are routed to it, [n, W].
        router: [E, W].
        correction: [E], None = 0.

    Returns:
        [..., W] in the dtype of x.
    """
    flat = x.reshape(-1, x.shape[-1])
    experts, weights = routed(mixture, flat, router, correction)
    total = torch.zeros_like(flat, dtype=weights.dtype)
    for expert in sorted(set(experts.flatten().tolist())):
        token, slot = (experts == expert).nonzero(as_tuple=True)
        out = gated_mlp(f"{prefix}experts.{expert}.", flat[token], modules)
        total = total.index_add(0, token, out.to(weights.dtype) * weights[token, slot, None])
    total = total.to(x.dtype)
    if mixture.shared_width:
        shared = gated_mlp(f"{prefix}{mixture.shared}.", flat, modules)
        if mixture.gates_shared:
            shared = shared * modules.kept_linear(f"{prefix}shared_expert_gate", flat).sigmoid()
        total = total + shared.to(x.dtype)
    return total.view(x.shape)
