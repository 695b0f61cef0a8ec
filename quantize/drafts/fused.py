"""Which linears of a draft engines fuse into one, and what they call it: for every family.

Sources: vLLM 0.33 and SGLang 0.5.23, which agree but for the down-projections of MLA.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLinear:
    """One linear of an engine; every name is the last part of a module's.

    Attributes:
        members: the linears of the draft that it is made of, in this order.
        vllm, sglang: its name there.
    """

    members: tuple[str, ...]
    vllm: str
    sglang: str

    @property
    def names(self) -> tuple[str, ...]:
        """All its names, vLLM's first."""
        return tuple(dict.fromkeys((self.vllm, self.sglang)))


QKV = FusedLinear(members=("q_proj", "k_proj", "v_proj"), vllm="qkv_proj", sglang="qkv_proj")
GATE_UP = FusedLinear(members=("gate_proj", "up_proj"), vllm="gate_up_proj", sglang="gate_up_proj")
MLA_DOWN = FusedLinear(
    members=("q_a_proj", "kv_a_proj_with_mqa"),
    vllm="fused_qkv_a_proj",
    sglang="fused_qkv_a_proj_with_mqa",
)
FUSED_LINEARS = (QKV, GATE_UP, MLA_DOWN)


def fused_linear(leaf: str) -> FusedLinear | None:
    """The fused linear that `leaf`, the last part of a module's name, is a member of."""
    return next((fused for fused in FUSED_LINEARS if leaf in fused.members), None)


def fused_names(module: str) -> tuple[str, ...]:
    """The linears into which engines fuse a module; empty where they leave it alone."""
    parent, dot, leaf = module.rpartition(".")
    fused = fused_linear(leaf)
    return tuple(f"{parent}{dot}{name}" for name in fused.names) if fused else ()


def fused_group(module: str) -> tuple[str, str]:
    """Parent and leaf of the linear into which vLLM fuses a module, its own where it does not."""
    parent, _, leaf = module.rpartition(".")
    fused = fused_linear(leaf)
    return parent, fused.vllm if fused else leaf
