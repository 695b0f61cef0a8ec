"""Small language models as drafts: replayed as transformers' own models decode, round by round."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.passes.draft_inputs import first_hidden
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import CheckpointError
from draftquant.validate.counting.trace_replay import accepted_by_row, decoding_steps, replay_drafts
from proposing import draft_proposals
from recorded import record_traces
from reference_draft import transformers_in_float64
from tied_pair import prompt_tokens, save_target
from tiny import edit_json
from tiny_llama import tiny_language_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language-model")
    save_target(folder / "target")
    prompts = [
        Prompt(id=f"p{i}", category="a", token_ids=tokens)
        for i, tokens in enumerate([*prompt_tokens(1, 12), *prompt_tokens(1, 1)])
    ]
    with transformers_in_float64():
        record_traces(
            folder / "target", prompts, folder / "traces", max_new_tokens=24, dtype="float64"
        )
    return folder


def save_draft(folder: Path, target: Path, kind: str) -> Path:
    """The target with noise in its weights, in another kind's layers; tied only for "tied"."""
    torch.manual_seed(3)
    source = LlamaForCausalLM.from_pretrained(target)
    keys = {k: v for k, v in source.config.to_dict().items() if k not in ("model_type", "dtype")}
    model: PreTrainedModel = source
    if kind == "Qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**keys))
    if kind == "Qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**keys))
    with torch.no_grad():
        weights = model.state_dict()
        for name, weight in weights.items():
            if name in source.state_dict():
                weight.copy_(source.state_dict()[name])
            if "layers" in name:
                weight.add_(torch.randn_like(weight) * 0.3 * weight.std().nan_to_num(1.0))
        if kind == "tied":
            weights["model.embed_tokens.weight"].copy_(weights["lm_head.weight"])
            model.config.tie_word_embeddings = True
            model.tie_weights()
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def decoded_rounds(draft: PreTrainedModel, tokens: Sequence[int], prompt_length: int) -> list[int]:
    """Accepted tokens per round: the draft reads all committed tokens anew for each one of its."""
    accepted, last = [], prompt_length
    while last + K < len(tokens):
        text = list(tokens[: last + 1])
        for _ in range(K):
            text.append(int(draft(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
        right = [a == b for a, b in zip(text[last + 1 :], tokens[last + 1 :], strict=False)]
        accepted.append(right.index(False) if False in right else K)
        last += accepted[-1] + 1
    return accepted


def proposals(draft: Any, traces: TraceFolder, trace: Any) -> Tensor:
    return draft_proposals(
        draft.forward,
        first_hidden(draft, traces, trace),
        trace.token_ids,
        first_row=trace.prompt_length - 1,
        num_draft_tokens=K,
        block_rows=7,
    ).token_ids


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "tied"])
def test_replay_is_decoding_with_transformers(kind: str, folder: Path, tmp_path: Path) -> None:
    path = save_draft(tmp_path / "draft", folder / "target", kind)
    draft = load_draft(path, dtype=torch.float64)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    traces, some = TraceFolder.open(folder / "traces"), 0
    for trace in traces:
        expected = decoded_rounds(model, trace.token_ids.tolist(), trace.prompt_length)
        predicted = proposals(draft, traces, trace)
        assert decoding_steps(accepted_by_row(trace, predicted)) == expected
        likely = model(input_ids=trace.token_ids[None]).logits[0].argmax(-1)
        first = predicted[:, 0]
        assert torch.equal(first, likely[trace.prompt_length :][: len(first)])
        some += sum(expected)
    assert some > 5 or kind == "tied"  # whose head is another table than the target's
    (counted,) = replay_drafts([draft], traces, num_draft_tokens=K)
    assert sum(i * n for i, n in enumerate(counted.counts.histogram)) == some


def test_what_config_json_does_not_say(tmp_path: Path) -> None:
    """A model is not tied, and Qwen2's attention has biases of its inputs alone."""
    source = tiny_language_model(tmp_path / "draft", kind="Qwen2", config={"attention_bias": True})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    del config["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    geometry = read_draft(Checkpoint.open(source)).geometry
    attention = geometry.attention
    assert (geometry.tied, attention.input_bias, attention.output_bias) == (False, True, False)


def test_a_config_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for kind, key, value, what in (
        ("Qwen3", "attention_bias", True, "attention_bias: expected false, got true"),
        ("Qwen2", "head_dim", 32, "head_dim: expected hidden_size / num_attention_heads = 16"),
        ("Qwen2", "use_sliding_window", True, "use_sliding_window: expected False, got True"),
        ("Llama", "vocab_size", 97, r"expected shape \[97, 64\], got \[96, 64\]"),
    ):
        folder = tiny_language_model(tmp_path / key, kind=kind)
        edit_json(folder / "config.json", **{key: value})
        with pytest.raises(CheckpointError, match=what):
            read_draft(Checkpoint.open(folder))
