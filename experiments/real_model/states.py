"""Text that the target writes after training prompts, with the hidden states that drafts read.

A shard holds `PER_SHARD` texts: token ids, and in BF16 the outputs of the auxiliary layers and the
last hidden state. The target runs once and each step gives both, so no text is read again. To save
time the training text is the greedy one over the draft vocabulary's rows of the head, and BF16
products; held-out text is what `draftquant record` writes with the whole head in float32.
"""

import json
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

AUX_LAYERS = (2, 9, 15)
"""After these layers, of 18, EAGLE-3 reads: 2, half, and the third from the end."""
DRAFT_VOCABULARY = 32_768
NEW_TOKENS = 64
PER_SHARD = 256
_TOGETHER = 128


def texts(path: Path) -> list[str]:
    """The texts of a file of prompts."""
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def counts(folder: Path, vocab_size: int) -> list[int]:
    """How often each token stands in the shards."""
    ids = torch.cat([load_file(p)["token_ids"].flatten() for p in folder.glob("???.safetensors")])
    return ids.bincount(minlength=vocab_size).tolist()


def draft_vocabulary(ids: Tensor) -> Tensor:
    """[`DRAFT_VOCABULARY`] int64: what occurs in training text most often, then the lowest ids."""
    often = [token for token, _ in Counter(ids.flatten().tolist()).most_common(DRAFT_VOCABULARY)]
    rest = (token for token in range(2 * DRAFT_VOCABULARY) if token not in set(often))
    missing = DRAFT_VOCABULARY - len(often)
    return torch.tensor(sorted([*often, *(next(rest) for _ in range(missing))]))


def write_shards(
    target: Path, tokenizer: PreTrainedTokenizerFast, prompts: Path, folder: Path, count: int
) -> None:
    """Write those of `count` shards that are missing, and vocabulary.safetensors before them."""
    ids = torch.tensor(tokenizer(texts(prompts)).input_ids)
    listed = folder / "vocabulary.safetensors"
    if not listed.exists():
        save_file({"vocabulary": draft_vocabulary(ids)}, listed)
    # Eager attention: torch's fused one takes most of the time of a step of one token in BF16.
    model = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    head = model.get_output_embeddings().weight.detach()[load_file(listed)["vocabulary"]]
    for i, some in enumerate(torch.split(ids, PER_SHARD)[:count]):
        path = folder / f"{i:03}.safetensors"
        if path.exists():
            continue
        parts = [_written(model, head, listed, batch) for batch in torch.split(some, _TOGETHER)]
        shard = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        save_file(shard, path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)
        print(f"shard {i + 1} of {count}", flush=True)


@torch.inference_mode()
def _written(model: torch.nn.Module, head: Tensor, listed: Path, ids: Tensor) -> dict[str, Tensor]:
    """Of prompts [B, P]: token_ids [B, P + `NEW_TOKENS`] int32, features, final_hidden BF16."""
    vocabulary, cache = load_file(listed)["vocabulary"], DynamicCache(config=model.config)
    unread, tokens = ids, [ids]
    features: list[Tensor] = []
    final: list[Tensor] = []
    for _ in range(NEW_TOKENS + 1):
        out = model.base_model(input_ids=unread, past_key_values=cache, output_hidden_states=True)
        states = [out.hidden_states[layer + 1] for layer in AUX_LAYERS]
        features.append(torch.cat(states, dim=-1))
        final.append(out.last_hidden_state)
        unread = vocabulary[(final[-1][:, -1:] @ head.T).argmax(-1)]
        tokens.append(unread)
    return {
        "token_ids": torch.cat(tokens[:-1], dim=1).int(),
        "features": torch.cat(features, dim=1),
        "final_hidden": torch.cat(final, dim=1),
    }
