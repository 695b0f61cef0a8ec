"""The models that the trainer builds: kinds of target, latent attention and blocks of a draft."""

from pathlib import Path

import pytest
import torch
import transformers
from draftquant.quantize.drafts.families.dflash import DFlash
from draftquant.scripts.training.corpus import train_tokenizer
from draftquant.scripts.training.dflash import DFlashDraft, DFlashSize
from draftquant.scripts.training.draft import rows
from draftquant.scripts.training.eagle3 import attend_chain
from draftquant.scripts.training.eagle3_mla import MlaChainAttention, MlaEagle3Size
from draftquant.scripts.training.optimisation import Schedule
from draftquant.scripts.training.rotary import Yarn
from draftquant.scripts.training.target import (
    TargetKind,
    TargetSize,
    Traces,
    greedy_continuations,
    input_embedding,
    output_head,
    record_traces,
    ship_target,
    train_target,
)
from draftquant.scripts.training.target_kinds import DEEPSEEK_V3, LLAMA, QWEN3
from reference_dflash import ReferenceDFlash
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

SIZE = TargetSize(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
SCHEDULE = Schedule(num_steps=1, batch_size=2, max_learning_rate=1e-3)


@pytest.mark.parametrize(
    ("kind", "class_name", "own_tensor"),
    [
        (LLAMA, "LlamaForCausalLM", "self_attn.q_proj.weight"),
        (QWEN3, "Qwen3ForCausalLM", "self_attn.q_norm.weight"),
        (DEEPSEEK_V3, "DeepseekV3ForCausalLM", "self_attn.kv_a_proj_with_mqa.weight"),
    ],
    ids=["llama", "qwen3", "deepseek_v3"],
)
def test_every_kind_of_target_trains_ships_and_continues(
    kind: TargetKind, class_name: str, own_tensor: str, tmp_path: Path
) -> None:
    stream = torch.arange(200)
    trained, _ = train_target(kind, SIZE, stream, SCHEDULE, sequence_length=16, seed=0)
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"], SIZE.vocab_size)
    shipped = ship_target(trained, tokenizer, tmp_path / "target")

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert type(reloaded).__name__ == class_name
    assert reloaded.config.model_type == kind.name
    names = dict(reloaded.named_parameters())
    assert f"model.layers.3.{own_tensor}" in names
    assert "model.layers.3.mlp.down_proj.weight" in names  # a dense MLP, in the last layer too

    token_ids = greedy_continuations(shipped, stream[None, :8], num_new_tokens=4)
    traces = record_traces(shipped, token_ids, prompt_length=8, aux_layer_ids=(0, 2))
    assert traces.features.shape == (1, 12, 2 * SIZE.hidden_size)
    assert torch.equal(traces.features[..., :32], hidden_after(shipped, token_ids, layer=0))
    assert torch.equal(output_head(shipped)(traces.final_hidden), shipped(token_ids).logits)
    assert input_embedding(shipped).weight is shipped.model.embed_tokens.weight


def hidden_after(
    target: transformers.PreTrainedModel, token_ids: torch.Tensor, *, layer: int
) -> torch.Tensor:
    """What a hook behind a layer sees."""
    seen: list[torch.Tensor] = []
    hook = target.model.layers[layer].register_forward_hook(
        lambda _module, _inputs, output: seen.append(output)
    )
    with torch.no_grad():
        target(token_ids, use_cache=False)
    hook.remove()
    return seen[0]


def test_llama_target_starts_from_the_weights_of_its_class() -> None:
    torch.manual_seed(0)
    by_class = LlamaForCausalLM(LLAMA.config(SIZE))
    torch.manual_seed(0)
    by_kind = AutoModelForCausalLM.from_config(LLAMA.config(SIZE))
    assert by_kind.dtype == torch.float32
    expected = by_class.state_dict()
    assert all(torch.equal(expected[name], w) for name, w in by_kind.state_dict().items())


@pytest.mark.parametrize(
    "yarn",
    [
        MlaEagle3Size().yarn,
        Yarn(factor=64.0, original_max_position_embeddings=4096, beta_fast=32.0),
    ],
    ids=["shipped", "long_ramp"],
)
def test_latent_attention_equals_transformers(yarn: Yarn) -> None:
    hidden_size, num_rows = 24, 40
    # transformers norms the latents with its default eps, whatever the config says.
    size = MlaEagle3Size(num_attention_heads=2, rms_norm_eps=1e-6, yarn=yarn)
    config = DeepseekV3Config(
        hidden_size=2 * hidden_size,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=size.q_lora_rank,
        kv_lora_rank=size.kv_lora_rank,
        qk_nope_head_dim=size.qk_nope_head_dim,
        qk_rope_head_dim=size.qk_rope_head_dim,
        v_head_dim=size.v_head_dim,
        max_position_embeddings=512,
        rope_theta=size.rope_theta,
        rope_scaling=size.yarn.published_config(),
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    ours = MlaChainAttention(hidden_size, size)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs = DeepseekV3Attention(config, layer_idx=0)
    # Theirs is as wide at its output as at its input: its o_proj is left out.
    theirs.o_proj = torch.nn.Identity()
    theirs.load_state_dict(
        {name: w for name, w in ours.state_dict().items() if not name.startswith("o_proj")}
    )
    inputs = torch.randn(1, num_rows, 2 * hidden_size)
    positions = torch.arange(num_rows)
    visible = positions <= positions[:, None]
    mask = torch.zeros(num_rows, num_rows).masked_fill(~visible, -torch.inf)

    with torch.no_grad():
        expected, _ = theirs(
            inputs,
            position_embeddings=DeepseekV3RotaryEmbedding(config)(inputs, positions[None]),
            attention_mask=mask[None, None],
        )
        queries, keys, values = ours.project(inputs, positions)
        got = attend_chain(queries, (keys, values), [], visible, ours.scale)
    # float32 sums over 48 and 40 terms of order 1 in another order: a few hundred ulp of 6e-8.
    assert torch.allclose(got, expected, rtol=0, atol=2e-5)


def test_softmax_factor_of_the_published_drafts() -> None:
    # (0.1 ln 64 + 1)^2 for the factor 64 of the Kimi drafts.
    kimi = Yarn(factor=64.0, original_max_position_embeddings=4096)
    assert kimi.softmax_factor() == pytest.approx(2.00474, abs=1e-5)


def test_dflash_blocks_equal_transformers() -> None:
    num_draft_tokens, features_width = 5, 3 * SIZE.hidden_size
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(QWEN3.config(SIZE))
    size = DFlashSize(
        intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    draft = DFlashDraft(target, SIZE, size)
    for parameter in (*draft.parameters(), draft.target_embedding, draft.target_head):
        torch.nn.init.normal_(parameter, std=0.3)
    traces = Traces(
        token_ids=torch.randint(1, SIZE.vocab_size, (1, 20)),
        features=torch.randn(1, 20, features_width),
        final_hidden=torch.empty(0),
        prompt_length=6,
    )
    chain_rows = rows(traces, num_draft_tokens)[1::3]

    geometry = DFlash().read_geometry(dict(draft.published_config()), "config.json")
    weights = draft.state_dict() | {
        "embed_tokens.weight": input_embedding(target).weight.data,
        "lm_head.weight": output_head(target).weight.data,
    }
    with torch.no_grad():
        got = torch.stack(draft.chain_logits(traces, chain_rows, num_draft_tokens), dim=2)
    for index, row in enumerate(chain_rows):
        reference = ReferenceDFlash(geometry, weights)
        reference.extend(traces.features[:, : row + 1])
        expected = reference.propose(int(traces.token_ids[0, row + 1]), num_draft_tokens)
        # float32 through three layers: some 1e4 roundings of 6e-8 on values of order 1.
        assert torch.allclose(got[0, index], expected, rtol=0, atol=1e-4)
        assert expected.std() > 0.3
