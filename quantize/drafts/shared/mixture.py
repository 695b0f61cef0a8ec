"""A mixture of experts instead of an MLP: its config keys, its tensors, and its maths.

Sources: `DeepseekV2MoE` (`deepseek_v2.py`), `Glm4MoE` (`glm4_moe.py`) and `Qwen3NextSparseMoeBlock`
(`qwen3_next.py`) of vLLM 0.33.
"""

import re
from dataclasses import dataclass
from typing import Literal

from ....recipes.errors import CheckpointError
from ..config_reader import ConfigReader
from ..family import Dim
from ..forward import ModulesForward, gated_mlp
from ..maths import Tensor, linear, torch
from .layers import Shapes, mlp_shapes

_EXPERT = re.compile(r"\.(experts\.\d+|shared_experts?)\.")
_EPSILON = 1e-20
"""Added to the sum that divides the weights, as engines and transformers do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sizes and routing of a mixture of experts instead of an MLP; widths in elements.

    Attributes:
        per_token: routed experts that see a token, from the best `groups_per_token` groups.
        shared_width: width of the expert that sees every token, in the module `shared`; 0 = none.
        corrects: e_score_correction_bias is added to scores to choose experts, not to weight
            them.
        normalises: the weights of a token's experts are divided by their sum.
        scale: multiplies the routed experts' output.
        gates_shared: sigmoid of shared_expert_gate, one number per token, multiplies its output.
    """

    num_experts: int
    per_token: int
    width: int
    shared_width: int
    scoring: Literal["sigmoid", "softmax"]
    normalises: bool
    corrects: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    shared: str = "shared_experts"
    gates_shared: bool = False


def read_mixture(keys: ConfigReader) -> Mixture:
    """A mixture as DeepSeek-V3 and GLM-4.x spell it."""
    config = keys.config
    for key, wanted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        got = config.get(key, wanted)
        if got != wanted:
            raise CheckpointError(
                keys.where,
                f"{key}: expected {wanted!r}, got {got!r}",
                fix="a layer with other routing cannot be replayed",
            )
    width = keys.positive("moe_intermediate_size")
    shared = config.get("n_shared_experts")
    mixture = Mixture(
        num_experts=keys.positive("n_routed_experts"),
        per_token=keys.positive("num_experts_per_tok"),
        width=width,
        shared_width=width * keys.positive("n_shared_experts") if shared else 0,
        scoring="sigmoid",
        corrects=True,
        num_groups=keys.positive("n_group", 1),
        groups_per_token=keys.positive("topk_group", 1),
        normalises=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 1.0),
    )
    in_group, rest = divmod(mixture.num_experts, mixture.num_groups)
    chosen, opened = mixture.per_token, mixture.groups_per_token
    fits = not rest and in_group > 1  # two of a group decide whether it is opened
    fits = fits and opened <= mixture.num_groups and chosen <= in_group * opened
    if not fits:
        raise CheckpointError(
            keys.where,
            f"{chosen} of {mixture.num_experts} experts cannot be chosen from {opened} of"
            f" {mixture.num_groups} groups",
            fix="correct num_experts_per_tok, n_routed_experts, n_group or topk_group",
        )
    return mixture


def read_qwen_mixture(keys: ConfigReader) -> Mixture:
    """A mixture as Qwen3-Next and Qwen3.5 spell it."""
    mixture = Mixture(
        num_experts=keys.positive("num_experts"),
        per_token=keys.positive("num_experts_per_tok"),
        width=keys.positive("moe_intermediate_size"),
        shared_width=keys.positive("shared_expert_intermediate_size"),
        scoring="softmax",
        normalises=keys.flag("norm_topk_prob", True),
        shared="shared_expert",
        gates_shared=True,
    )
    experts, chosen = mixture.num_experts, mixture.per_token
    if chosen > experts:
        raise CheckpointError(
            keys.where,
            f"num_experts_per_tok: expected at most num_experts, {experts}, got {chosen}",
            fix="correct 'num_experts_per_tok' or 'num_experts'",
        )
    return mixture


def mixture_shapes(mixture: Mixture, hidden: Dim) -> Shapes:
    """The router, every expert, and the shared one, by whole names."""
    experts = Dim(mixture.num_experts, "n_routed_experts")
    inner = Dim(mixture.width, "moe_intermediate_size")
    shapes: Shapes = {"mlp.gate.weight": ("router", (experts, hidden))}
    if mixture.corrects:
        shapes["mlp.gate.e_score_correction_bias"] = ("router", (experts,))
    for i in range(mixture.num_experts):
        shapes |= mlp_shapes(f"mlp.experts.{i}.", inner, hidden)
    if mixture.shared_width:
        shared = Dim(mixture.shared_width, "the width of the shared expert")
        shapes |= mlp_shapes(f"mlp.{mixture.shared}.", shared, hidden)
    if mixture.gates_shared:
        shapes["mlp.shared_expert_gate.weight"] = ("router", (Dim(1, "one gate"), hidden))
    return shapes


def is_expert(name: str) -> bool:
    """True for a tensor of a routed or shared expert."""
    return _EXPERT.search(name) is not None


def without_expert(name: str) -> str:
    """The name without "experts.N.": what all experts of a layer share."""
    return _EXPERT.sub(".", name)


def of_any_expert(name: str) -> str:
    """The name with a star for the number of its routed expert."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def routed(
    mixture: Mixture, x: Tensor, router: Tensor, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The experts of each token, [N, k] int64, and their weights, [N, k], in float32 or wider.

    s = sigmoid(router x); the experts are the largest of s + correction within the groups whose two
    largest s + correction have the largest sum; weights are their s, divided by their sum, times a
    constant. x [N, W], router [E, W] and correction [E], None = 0.
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


def mixture_mlp(mixture: Mixture, prefix: str, x: Tensor, modules: ModulesForward) -> Tensor:
    """The weighted sum of a token's experts, and of the shared one, [..., W] in the dtype of x.

    The linears of an expert see the tokens that are routed to it, [n, W].
    """
    flat = x.reshape(-1, x.shape[-1])
    router = modules.weights[f"{prefix}gate.weight"]
    correction = modules.weights.get(f"{prefix}gate.e_score_correction_bias")
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
