"""A mixture of experts in place of an MLP: its config keys and its tensors, one by one per expert.

Sources: `DeepseekV2MoE` (`deepseek_v2.py`), `Glm4MoE` (`glm4_moe.py`) and `Qwen3NextSparseMoeBlock`
(`qwen3_next.py`) of vLLM 0.33.
"""

import re
from dataclasses import dataclass
from typing import Literal

from .....recipes.errors import CheckpointError
from ...config_reader import ConfigReader
from ...family import Dim
from ..attention.names import Shapes

_EXPERT = re.compile(r"\.(experts\.\d+|shared_experts?)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sizes and routing of a mixture; widths in elements.

    Attributes:
        num_experts: routed experts. per_token: of these, how many see a token.
        width: of one routed expert. shared_width: of the expert that sees every token; 0 = none.
        scoring: how the router's logits become scores.
        corrects: e_score_correction_bias is added to scores where experts are chosen, not where
            they are weighed.
        num_groups: experts are chosen from the best `groups_per_token` of so many groups.
        normalises: the weights of a token's experts are divided by their sum.
        scale: of what the routed experts give.
        shared: name of the module of the expert that sees every token.
        gates_shared: its output is weighed by sigmoid of shared_expert_gate, one number per token.
    """

    num_experts: int
    per_token: int
    width: int
    shared_width: int
    scoring: Literal["sigmoid", "softmax"]
    corrects: bool
    num_groups: int
    groups_per_token: int
    normalises: bool
    scale: float
    shared: str = "shared_experts"
    gates_shared: bool = False


def read_mixture(keys: ConfigReader) -> Mixture:
    """A mixture as DeepSeek-V3 and GLM-4.x spell it.

    Raises:
        CheckpointError: a key is missing or wrong, or asks for other routing than engines serve.
    """
    config = keys.config
    for key, wanted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key, wanted) != wanted:
            raise CheckpointError(
                keys.where,
                f"{key}: expected {wanted!r}, got {config[key]!r}",
                fix="a layer with other routing cannot be replayed",
            )
    width = keys.positive("moe_intermediate_size")
    shared = config.get("n_shared_experts")
    found = Mixture(
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
    in_group, rest = divmod(found.num_experts, found.num_groups)
    if (
        rest
        or found.groups_per_token > found.num_groups
        or (found.per_token > in_group * found.groups_per_token)
    ):
        raise CheckpointError(
            keys.where,
            f"{found.per_token} of {found.num_experts} experts cannot be chosen from"
            f" {found.groups_per_token} of {found.num_groups} groups",
            fix="correct num_experts_per_tok, n_routed_experts, n_group or topk_group",
        )
    return found


def read_qwen_mixture(keys: ConfigReader) -> Mixture:
    """A mixture as Qwen3-Next and Qwen3.5 spell it.

    Raises:
        CheckpointError: a key is missing or wrong.
    """
    found = Mixture(
        num_experts=keys.positive("num_experts"),
        per_token=keys.positive("num_experts_per_tok"),
        width=keys.positive("moe_intermediate_size"),
        shared_width=keys.positive("shared_expert_intermediate_size"),
        scoring="softmax",
        corrects=False,
        num_groups=1,
        groups_per_token=1,
        normalises=keys.flag("norm_topk_prob", True),
        scale=1.0,
        shared="shared_expert",
        gates_shared=True,
    )
    if found.per_token > found.num_experts:
        raise CheckpointError(
            keys.where,
            f"num_experts_per_tok: expected at most num_experts, {found.num_experts}, got"
            f" {found.per_token}",
            fix="correct 'num_experts_per_tok' or 'num_experts'",
        )
    return found


def mixture_shapes(mixture: Mixture, hidden: Dim) -> Shapes:
    """The router, every expert, and the shared one."""
    experts = Dim(mixture.num_experts, "n_routed_experts")
    shapes: Shapes = {"mlp.gate.weight": ("router", (experts, hidden))}
    if mixture.corrects:
        shapes["mlp.gate.e_score_correction_bias"] = ("router", (experts,))
    inner = Dim(mixture.width, "moe_intermediate_size")
    for i in range(mixture.num_experts):
        shapes |= mlp_shapes(f"mlp.experts.{i}.", inner, hidden)
    if mixture.shared_width:
        shared = Dim(mixture.shared_width, "the width of the shared expert")
        shapes |= mlp_shapes(f"mlp.{mixture.shared}.", shared, hidden)
    if mixture.gates_shared:
        shapes["mlp.shared_expert_gate.weight"] = ("router", (Dim(1, "one gate"), hidden))
    return shapes


def mlp_shapes(prefix: str, inner: Dim, hidden: Dim) -> Shapes:
    """The three linears of one MLP."""
    return {
        f"{prefix}gate_proj.weight": ("mlp", (inner, hidden)),
        f"{prefix}up_proj.weight": ("mlp", (inner, hidden)),
        f"{prefix}down_proj.weight": ("mlp", (hidden, inner)),
    }


def is_expert(name: str) -> bool:
    """True for a tensor of a routed or shared expert."""
    return _EXPERT.search(name) is not None


def without_expert(name: str) -> str:
    """The name with "experts.N." left out: what all experts of a layer have in common."""
    return _EXPERT.sub(".", name)


def of_any_expert(name: str) -> str:
    """The name with the number of its routed expert as a star."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)
