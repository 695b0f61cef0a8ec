"""EAGLE-3 MLA forward maths against an independent draft made of transformers' DeepSeek-V3 modules.

Tolerance: as in test_eagle3_forward.py. The latents add two dot products and two norms to the ten
dot products of a Llama layer, and yarn's m^2 (at most 2) sharpens the softmax: still 1e4 roundings
of 1.1e-16, amplified by at most 100 = 1e-10.
"""

from typing import Any

import pytest
from draftquant.quantize.drafts.families.eagle3_mla import Eagle3Mla
from draftquant.quantize.drafts.passes import ChainForward
from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from reference_draft import (
    ReferenceMlaDraft,
    check_extend_and_chain,
    random_weights,
)
from torch import Tensor

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,  # all head widths differ
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
KIMI = YARN | MSCALE | {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": YARN},  # no mscale_all_dim: cos and sin grow, the softmax does not
    "yarn-two-mscales": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "kimi-rope": {"rope_theta": 50000.0, "rope_scaling": KIMI},
    "rope-halves-yarn": {"rope_interleave": False, "rope_scaling": YARN | MSCALE},
    "wide-values": {"v_head_dim": 40},
    "three-layers": {"num_hidden_layers": 3, "rope_scaling": YARN | MSCALE},
    "eagle-3.1": {"fc_norm": True, "norm_output": True, "rope_scaling": KIMI},
    "pruned-vocabulary": {"draft_vocab_size": 24},
}


def read(**changes: Any) -> Eagle3Geometry:
    return Eagle3Mla().read_geometry(CONFIG | changes, "config.json")


def build(case: str) -> tuple[Eagle3Geometry, dict[str, Tensor], ChainForward]:
    geometry = read(**CASES[case])
    weights = random_weights(geometry, family=Eagle3Mla())
    return geometry, weights, Eagle3Mla().forward(geometry, weights, lambda _name, x: x)


@pytest.mark.parametrize("case", CASES)
def test_extend_and_chain_equal_the_transformers_modules(case: str) -> None:
    geometry, weights, forward = build(case)
    check_extend_and_chain(geometry, forward, ReferenceMlaDraft(geometry, weights))


# What engines do where transformers does something else


FULL, HALF = 1.2079441541679836, 1.1039720770839918
"""0.1 mscale ln 8 + 1 for mscale 1 and 0.5."""
