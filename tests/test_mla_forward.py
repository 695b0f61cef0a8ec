"""EAGLE-3 MLA forward maths against an independent draft made of transformers' DeepSeek-V3 modules.

Tolerance: as in test_eagle3_forward.py. The latents add two dot products and two norms to the ten
dot products of a Llama layer, and yarn's m^2 (at most 2) sharpens the softmax: still 1e4 roundings
of 1.1e-16, amplified by at most 100 = 1e-10.
"""

import math
from typing import Any

import pytest
import torch
from draftquant.quantize.drafts.families.eagle3_mla import Eagle3Mla
from draftquant.quantize.drafts.passes import ChainForward
from draftquant.quantize.drafts.rope import rope_frequencies
from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from draftquant.quantize.drafts.shared.layers import MlaAttention, served_rope, softmax_mscale
from plain_attention import softmax_attention
from proposing import draft_proposals
from reference_draft import CachedAttention, assert_close, check_extend_and_chain, random_weights
from reference_mla import ReferenceMlaDraft
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
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
KIMI = YARN | MSCALE | {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "plain-rope": {},
    "yarn": {"rope_scaling": YARN},  # no mscale_all_dim: cos and sin grow, the softmax does not
    "yarn-mscale": {"rope_scaling": YARN | MSCALE},
    "yarn-two-mscales": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn-zero-all-dim": {"rope_scaling": YARN | {"mscale_all_dim": 0}},
    "kimi-rope": {"rope_theta": 50000.0, "rope_scaling": KIMI},
    "rope-halves": {"rope_interleave": False},
    "rope-halves-yarn": {"rope_interleave": False, "rope_scaling": YARN | MSCALE},
    "one-head": {"num_attention_heads": 1},
    "wide-values": {"v_head_dim": 40},
    "kimi-ratios": {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "two-layers": {"num_hidden_layers": 2},
    "three-layers": {"num_hidden_layers": 3, "rope_scaling": YARN | MSCALE},
    "norm-before-residual": {"norm_before_residual": True},
    "norm-before-fc": {"norm_before_fc": True},
    "norm-output": {"norm_output": True},
    "fc-norm": {"fc_norm": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True, "rope_scaling": KIMI},
    "pruned-vocabulary": {"draft_vocab_size": 24},
    "other-target-width": {"target_hidden_size": 40},
    "eps": {"rms_norm_eps": 1e-2},
}


def hidden_rows(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, count, 32, generator=generator, dtype=torch.float64)


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


WRONG: dict[str, dict[str, Any]] = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "rope_interleave": {"rope_interleave": False},
    "rope base": {"rope_theta": 50000.0},
    "softmax scale": {"rope_scaling": YARN | {"mscale": 1.0}},
    "epsilon of every norm": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("option", WRONG)
def test_the_reference_notices_each_option(option: str) -> None:
    """The comparison has teeth: each option moves the logits far beyond the tolerance."""
    right = read(rope_scaling=YARN | MSCALE)
    wrong = read(**{"rope_scaling": YARN | MSCALE, **WRONG[option]})
    assert right != wrong
    weights = random_weights(right, family=Eagle3Mla())
    ours = Eagle3Mla().forward(wrong, weights, lambda _name, x: x)
    reference = ReferenceMlaDraft(right, weights)
    tokens = torch.arange(6)[None]
    hidden = hidden_rows(6)
    attend = CachedAttention()
    fed = ours.step(tokens, hidden, torch.arange(6), attend)
    fed = ours.step(tokens[:, -1:], fed[:, -1:], torch.tensor([6]), attend)
    logits = ours.logits(fed)
    _, reference_fed = reference.extend(tokens, hidden, 0)
    expected, _ = reference.extend(tokens[:, -1:], reference_fed[:, -1:], 6)
    assert (logits - expected).abs().max() > 1e-3


def test_the_latents_have_the_epsilon_of_the_draft() -> None:
    """With 1e-6 there, as transformers builds them, logits of small latents are other ones."""
    geometry, weights, forward = build("eps")
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        weights[f"layers.0.self_attn.{name}.weight"] *= 0.1
    reference = ReferenceMlaDraft(geometry, weights)
    tokens, hidden = torch.arange(6)[None], hidden_rows(6)
    ours = forward.logits(forward.step(tokens, hidden, torch.arange(6), CachedAttention()))
    assert_close(ours, reference.extend(tokens, hidden, 0)[0])
    for norm in ("q_a_layernorm", "kv_a_layernorm"):
        other = ReferenceMlaDraft(geometry, weights)
        getattr(other.layers[0].self_attn, norm).variance_epsilon = 1e-6
        assert (ours - other.extend(tokens, hidden, 0)[0]).abs().max() > 1e-3


# What engines do where transformers does something else


FULL, HALF = 1.2079441541679836, 1.1039720770839918
"""0.1 mscale ln 8 + 1 for mscale 1 and 0.5."""


@pytest.mark.parametrize(
    ("keys", "on_cos_and_sin", "m"),
    [
        # vLLM and SGLang: of mscale over that of mscale_all_dim, which default to 1 and 0.
        ({}, FULL, 1.0),
        ({"mscale": 0.5}, HALF, 1.0),
        ({"mscale_all_dim": 1.0}, 1.0, FULL),
        ({"mscale": 0.5, "mscale_all_dim": 0}, HALF, 1.0),
        ({"mscale": 0.5, "mscale_all_dim": 1.0}, HALF / FULL, FULL),
        ({"mscale": 1, "mscale_all_dim": 1}, 1.0, FULL),
    ],
)
def test_factors_of_yarn_by_hand(keys: dict[str, Any], on_cos_and_sin: float, m: float) -> None:
    geometry = read(rope_scaling=YARN | keys)
    _, factor = rope_frequencies(served_rope(geometry.rope), 8)
    assert math.isclose(factor, on_cos_and_sin, rel_tol=1e-15)
    assert math.isclose(softmax_mscale(geometry.rope), m, rel_tol=1e-15)
    assert math.isclose(MlaAttention(geometry).scale, 20**-0.5 * m**2, rel_tol=1e-14)


def test_kimi_softmax_scale_by_hand() -> None:
    """0.072169 * 1.41589^2 = 0.14468 for heads of 128 + 64 and a factor of 64."""
    geometry = read(qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=KIMI)
    assert math.isclose(MlaAttention(geometry).scale, 0.1446796, rel_tol=1e-6)


def test_the_ramp_is_rounded_whatever_truncate_says() -> None:
    plain, untruncated = (
        read(rope_theta=100.0, rope_scaling=YARN | extra) for extra in ({}, {"truncate": False})
    )
    served = [rope_frequencies(served_rope(g.rope), 8)[0] for g in (plain, untruncated)]
    assert torch.equal(*served)
    assert not torch.equal(served[0], rope_frequencies(untruncated.rope, 8)[0])


# Its place in the chain


def test_values_may_be_narrower_or_wider_than_keys() -> None:
    for case, width in (("plain-rope", 10), ("wide-values", 40)):
        _, _, forward = build(case)
        seen: list[tuple[int, ...]] = []

        def attend(
            _layer: int,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            scale: float,
            seen: list[tuple[int, ...]] = seen,
        ) -> Tensor:
            seen.extend(tuple(t.shape) for t in (q, k, v))
            return softmax_attention(q, k, v, scale, torch.ones(3, 3, dtype=torch.bool).tril())

        forward.step(torch.arange(3)[None], hidden_rows(3), torch.arange(3), attend)
        assert seen == [(1, 4, 3, 20), (1, 4, 3, 20), (1, 4, 3, width)]


def test_on_input_sees_each_linear_that_may_be_quantized_once() -> None:
    """Not kv_b_proj: engines keep it in floating point, with nothing rounded before it."""
    geometry, weights, _ = build("two-layers")
    seen: dict[str, tuple[int, ...]] = {}

    def observe(name: str, x: Tensor) -> Tensor:
        assert name not in seen
        seen[name] = tuple(x.shape)
        return x

    forward = Eagle3Mla().forward(geometry, weights, observe)
    forward.step(torch.arange(3)[None], hidden_rows(3), torch.arange(3), CachedAttention())
    specs = Eagle3Mla().tensor_specs(geometry)
    linears = {
        name.removesuffix(".weight"): (1, 3, spec.shape[1].size)
        for name, spec in specs.items()
        if spec.role in ("attention", "mlp")
    }
    assert seen == linears
    assert len(linears) == 2 * 7


def test_what_on_input_returns_is_multiplied() -> None:
    """A zero latent under kv_a leaves values and keys zero: the same as kv_a_proj = 0."""
    geometry, weights, _ = build("plain-rope")
    name = "layers.0.self_attn.kv_a_proj_with_mqa"
    forward = Eagle3Mla().forward(
        geometry, weights, lambda module, x: torch.zeros_like(x) if module == name else x
    )
    silent = weights | {f"{name}.weight": torch.zeros_like(weights[f"{name}.weight"])}
    tokens, hidden = torch.arange(4)[None], hidden_rows(4)
    got = forward.logits(forward.step(tokens, hidden, torch.arange(4), CachedAttention()))
    assert_close(got, ReferenceMlaDraft(geometry, silent).extend(tokens, hidden, 0)[0])
    full, _ = ReferenceMlaDraft(geometry, weights).extend(tokens, hidden, 0)
    assert (got - full).abs().max() > 1e-3


@pytest.mark.parametrize("block_rows", [1, 7, 256])
def test_every_row_is_a_chain_of_its_own(block_rows: int) -> None:
    """Two layers, random weights: all rows at once against a chain with a latent cache each."""
    geometry, weights, forward = build("two-layers")
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(geometry.vocab_size, (16,), generator=generator)
    hidden = torch.randn((15, 32), generator=generator, dtype=torch.float64)
    num_draft_tokens, first_row = 4, 3
    predicted = draft_proposals(
        forward,
        hidden,
        token_ids,
        first_row=first_row,
        num_draft_tokens=num_draft_tokens,
        block_rows=block_rows,
    ).token_ids
    for row in range(len(predicted)):
        reference = ReferenceMlaDraft(geometry, weights)
        t = first_row + row
        logits, fed = reference.extend(token_ids[None, 1 : t + 2], hidden[None, : t + 1], 0)
        for depth in range(num_draft_tokens):
            assert int(predicted[row, depth]) == int(logits[0, -1].argmax())
            position = t + 1 + depth
            logits, fed = reference.extend(
                token_ids[None, None, position + 1], fed[:, -1:], position
            )


def test_bfloat16_stays_close_to_float64() -> None:
    """Same rounding points as transformers in bfloat16, up to the order of sums.

    bfloat16 has 8 significant bits; a few roundings of 2^-9 relative on logits up to 10 stay under
    0.25, an order of magnitude under the spread of the logits.
    """
    geometry = read()
    weights = random_weights(geometry, family=Eagle3Mla())
    low = {name: tensor.bfloat16() for name, tensor in weights.items()}
    forward = Eagle3Mla().forward(geometry, low, lambda _name, x: x)
    exact = Eagle3Mla().forward(
        geometry, {n: t.double() for n, t in low.items()}, lambda _name, x: x
    )
    tokens, positions = torch.arange(8)[None], torch.arange(8)
    hidden = hidden_rows(8).bfloat16()
    fed = forward.step(tokens, hidden, positions, CachedAttention())
    got = forward.logits(fed)
    expected = exact.logits(exact.step(tokens, hidden.double(), positions, CachedAttention()))
    assert got.dtype == fed.dtype == torch.bfloat16
    assert expected.std() > 1
    assert (got - expected).abs().max() < 0.25
