"""What the target answers to training prompts, with the hidden states that drafts read.

A shard holds texts of prompts of like length: token ids, in BF16 the outputs of the auxiliary
layers and the last hidden state, and where each answer begins and ends. The target runs once, and
each step gives both.
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from prompts import FURTHER, asked
from safetensors.torch import load_file, save_file
from target import Llama
from torch import Tensor
from transformers import PreTrainedTokenizerFast

AUX_LAYERS = (2, 15, 27)
"""After these layers, of 30, drafts read: 2, half, and the third from the end."""
NEW_TOKENS = 128
_TOGETHER = 128
_ENDED = 0.85
"""Share of ended answers at which the others are cut."""
_READ = 16
"""Prompts that are read together, of those that are answered together."""


def counts(folder: Path, vocab_size: int) -> list[int]:
    """How often each token stands in the answers."""
    found = torch.zeros(vocab_size, dtype=torch.int64)
    for path in folder.glob("*.safetensors"):
        shard = load_file(path)
        for ids, start, end in zip(shard["token_ids"], shard["starts"], shard["ends"], strict=True):
            found += ids[start:end].bincount(minlength=vocab_size)
    return found.tolist()


def write_shards(
    target: Path, tokenizer: PreTrainedTokenizerFast, prompts: Path, folder: Path, count: int
) -> None:
    """Write the shards that are missing: first questions, then what dialogues ask further."""
    model = Llama(target)
    lines = prompts.read_text(encoding="utf-8").splitlines()[:count]
    first = [asked(tokenizer, json.loads(line)["turns"][0]) for line in lines]
    _write(model, first, folder, "first")
    _write(model, _further(tokenizer, folder), folder, "further")


def _write(model: Llama, prompts: Sequence[list[int]], folder: Path, name: str) -> None:
    for i, some in enumerate(batches := list(_batches(prompts))):
        path = folder / f"{name}-{i:03}.safetensors"
        if path.exists():
            continue
        began = time.perf_counter()
        shard = written(model, some)
        save_file(shard, path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)
        new = int(shard["ends"].sum()) - sum(map(len, some))
        seconds = time.perf_counter() - began
        print(f"{path.stem} of {len(batches)}: {new / seconds:.0f} tokens/s", flush=True)


def _batches(prompts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Prompts of like lengths together, in an order that mixes lengths."""
    by_length = sorted(prompts, key=len)
    starts = list(range(0, len(by_length), _TOGETHER))
    random.Random(0).shuffle(starts)
    for start in starts:
        yield by_length[start : start + _TOGETHER]


def _further(tokenizer: PreTrainedTokenizerFast, folder: Path) -> list[list[int]]:
    """The second question of a dialogue, after every fourth text that ended by itself."""
    found: list[list[int]] = []
    for path in sorted(folder.glob("first-*.safetensors")):
        shard = load_file(path)
        for ids, end in zip(shard["token_ids"].tolist(), shard["ends"].tolist(), strict=True):
            if ids[end - 1] == tokenizer.eos_token_id and end % 4 == 0:
                further = FURTHER[end // 4 % len(FURTHER)]
                turn = f"\n<|im_start|>user\n{further}<|im_end|>\n<|im_start|>assistant\n"
                found.append([*ids[:end], *tokenizer(turn).input_ids])
    return found


@torch.inference_mode()
def written(model: Llama, prompts: Sequence[list[int]]) -> dict[str, Tensor]:
    """Greedy answers to B prompts, of which the longest has P tokens.

    Returns:
        token_ids [B, P + `NEW_TOKENS`] int32, each text from its column 0 on; features
        [.., 3 * width] and final_hidden [.., width] BF16; starts and ends [B] int64, where the
        answer begins, and where the text ends, after the token that ends it. What follows is 0.
    """
    starts = torch.tensor([len(ids) for ids in prompts])
    longest, batch = int(starts.max()), len(prompts)
    pads, length = longest - starts, longest + NEW_TOKENS
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
    cache = model.empty_cache(batch, length)
    groups = [slice(first, first + _READ) for first in range(0, batch, _READ)]
    parts = [model.run(ids[g], pads[g], 0, cache[:, :, g], AUX_LAYERS) for g in groups]
    features, final = ([torch.cat(same).bfloat16()] for same in zip(*parts, strict=True))
    last = torch.cat([part[1][:, -1] for part in parts])
    tokens, ends = [ids], torch.full((batch,), length)
    for column in range(longest, length):
        new = (last.to(model.dtype) @ model.head.T).argmax(-1)
        tokens.append(new[:, None])
        ends[(new == model.config.eos_token_id) & (ends == length)] = column + 1
        taps, hidden = model.run(new[:, None], pads, column, cache, AUX_LAYERS)
        features.append(taps.bfloat16())
        final.append(hidden.bfloat16())
        last = hidden[:, 0]
        if (ends <= column).float().mean() > _ENDED:
            length = column + 1
            break
    ends = ends.clamp(max=length) - pads
    columns = torch.arange(length)
    places = (columns + pads[:, None]).clamp(max=length - 1)
    beyond = columns >= ends[:, None]

    def from_zero(parts: list[Tensor]) -> Tensor:
        whole = torch.cat(parts, dim=1)
        moved = whole[torch.arange(batch)[:, None], places]
        moved[beyond] = 0
        return moved

    moved = {"features": from_zero(features), "final_hidden": from_zero(final)}
    return {"token_ids": from_zero(tokens).int(), **moved, "starts": starts, "ends": ends}
