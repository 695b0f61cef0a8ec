"""Greedy traces of random features whose text is drawn by Zipf's law, for drafts of random weights.

A draft of random weights is right by chance: with n rows about once in n tokens that it has rows
for. The fewer rows, the more is accepted, and every number of accepted tokens occurs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.traces.manifest import FeatureSpec, TargetIdentity
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.traces.writer import trace_output
from draftquant.calibration.vocabulary.row_choice import RowChooser, RowOrder, TokenCounts

VOCAB = 96
CATEGORIES = ("code", "chat")


def write_said(
    out: Path,
    *,
    prompts: int = 8,
    tokens: int = 40,
    seed: int = 0,
    vocab: int = VOCAB,
    hidden: int = 64,
    layers: Sequence[int] = (1, 3, 4),
    categories: Sequence[str] = CATEGORIES,
    favourite: Mapping[str, int] | None = None,
    target: str = "random",
    num_layers: int = 8,
    width: int | None = None,
    fusion_sha256: str | None = None,
) -> TraceFolder:
    """Write traces of prompts of 5 to 9 tokens, category after category.

    The longest continuation has `tokens`, others up to four less; features are those of `layers`,
    each `hidden` wide; `favourite`: category -> a token that every other token of its text is.
    """
    generator = np.random.default_rng(seed)
    law = 1 / np.arange(1, vocab + 1) ** 1.3
    names = np.random.default_rng(7).permutation(vocab)  # the same words are frequent everywhere
    identity = TargetIdentity(
        name=target, config_sha256=None, weights_sha256=None, num_layers=num_layers,
        vocab_size=vocab,
    )  # fmt: skip
    spec = FeatureSpec(
        kind="fused" if fusion_sha256 else "aux", width=width or len(layers) * hidden,
        dtype="float32", aux_layer_ids=tuple(layers), fusion_sha256=fusion_sha256,
    )  # fmt: skip
    with trace_output(out, GREEDY.manifest(identity, spec)) as writer:
        for i in range(prompts):
            category, start = categories[i % len(categories)], 5 + i % 5
            count = start + tokens - i % 5
            ids = names[generator.choice(vocab, count, p=law / law.sum())]
            if category in (favourite or {}):
                ids[start::2] = (favourite or {})[category]
            text = torch.from_numpy(ids)
            features = generator.standard_normal((count - 1, spec.width), dtype=np.float32)
            trace = PromptTrace(
                id=f"{category}-{seed}-{i}", category=category, prompt_length=start,
                token_ids=text, features=torch.from_numpy(features), target_top1=text[1:],
            )  # fmt: skip
            writer.add(trace, position=i)
    return TraceFolder.open(out)


def row_order(said: TokenCounts, **chooser: Any) -> RowOrder:
    return RowChooser(vocab_size=said.by_category.shape[1], **chooser).order_of(said)
