"""The models that the trainer builds: kinds of target, and blocks of a draft."""

from pathlib import Path

import pytest
import torch
import transformers
from draftquant.scripts.dev.training.corpus import train_tokenizer
from draftquant.scripts.dev.training.draft import fresh_draft, scored_rows
from draftquant.scripts.dev.training.draft_kinds import DFLASH
from draftquant.scripts.dev.training.optimisation import Schedule
from draftquant.scripts.dev.training.target import (
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
from draftquant.scripts.dev.training.target_kinds import DEEPSEEK_V3, LLAMA, QWEN3
from reference_dflash import ReferenceDFlash
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

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


def test_dflash_blocks_equal_transformers() -> None:
    """Two sequences at once, every third row: each block against one of its own."""
    num_draft_tokens, features_width = 5, 3 * SIZE.hidden_size
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(QWEN3.config(SIZE))
    draft = fresh_draft(DFLASH, target, SIZE)
    for weight in draft.weights.values():
        torch.nn.init.normal_(weight, std=0.3)
    traces = Traces(
        token_ids=torch.randint(1, SIZE.vocab_size, (2, 20)),
        features=torch.randn(2, 20, features_width),
        final_hidden=torch.empty(0),
        prompt_length=6,
    )
    rows = scored_rows(traces, num_draft_tokens)[1::3]
    weights = {name: weight.detach() for name, weight in draft.weights.items()}
    with torch.no_grad():
        (one,) = draft.passes(traces, rows, num_draft_tokens)
        got = draft.forward.logits(one.hidden)
    for sequence in range(2):
        for index, row in enumerate(rows):
            reference = ReferenceDFlash(draft.geometry, weights)
            reference.extend(traces.features[sequence, None, : row + 1])
            anchor = int(traces.token_ids[sequence, row + 1])
            expected = reference.propose(anchor, num_draft_tokens)
            # float32 through three layers: some 1e4 roundings of 6e-8 on values of order 1.
            assert torch.allclose(got[sequence, index], expected, rtol=0, atol=1e-4)
            assert expected.std() > 0.3
