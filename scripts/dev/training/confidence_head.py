"""Train a confidence head for a DSpark draft that is done: nothing else of it changes.

    python -m draftquant.scripts.dev.training.confidence_head --draft DIR --traces T --out DIR

The head is one linear over [h_j; e_j], trained by binary cross-entropy to say whether the target
accepts drafted token j where it accepted all before it, along recorded text. That is a convex
problem, solved in seconds.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from safetensors.torch import load_file, save_file
from torch import Tensor

from ....calibration.passes.draft_inputs import first_hidden
from ....calibration.traces.prompt_trace import PromptTrace
from ....calibration.traces.trace_folder import TraceFolder
from ....quantize.drafts.forward import whole_rows
from ....quantize.drafts.maths import embedding
from ....quantize.stored.loading import LoadedDraft, load_draft

DECAY = 1e-4
"""Of the weights: their squares are added to the mean cross-entropy with it."""
_STEPS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when the draft was written."""
    parser = argparse.ArgumentParser(
        prog="draftquant.scripts.dev.training.confidence_head",
        description="Train a confidence head on a frozen DSpark draft.",
    )
    parser.add_argument("--draft", type=Path, required=True, help="BF16 DSpark draft without one")
    parser.add_argument("--traces", type=Path, required=True, help="of its target, with tables")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    chosen = parser.parse_args(arguments)
    traces = TraceFolder.open(chosen.traces)
    device = torch.device("cpu")
    draft = load_draft(chosen.draft, shared=traces.tables(None, device))
    inputs, accepted = samples(draft, traces)
    weight, bias, loss = trained_head(inputs, accepted)
    print(
        f"{len(accepted)} drafted tokens, {accepted.mean():.1%} of them accepted; cross-entropy"
        f" {loss:.4f}"
    )
    with_head(chosen.draft, weight, bias, chosen.out)
    return 0


@torch.no_grad()
def samples(draft: LoadedDraft, traces: TraceFolder) -> tuple[Tensor, Tensor]:
    """[N, W + r] what the head reads, and [N] whether the token was accepted.

    Of every position of the continuations and every slot that is reached: all before it accepted.
    """
    found = [_of_prompt(draft, traces, trace) for trace in traces]
    inputs, accepted = (torch.cat(one) for one in zip(*found, strict=True))
    return inputs, accepted


def _of_prompt(
    draft: LoadedDraft, traces: TraceFolder, trace: PromptTrace
) -> tuple[Tensor, Tensor]:
    forward, geometry = draft.forward, draft.geometry
    depths = geometry.token_limit.tokens
    table = draft.weights["markov_head.markov_w1.weight"]
    ids = trace.token_ids
    inputs, accepted = [], []
    for one in forward.passes(
        first_hidden(draft, traces, trace)[None],
        ids[None],
        rows=whole_rows(trace.num_tokens, depths, first_row=trace.prompt_length - 1),
        num_draft_tokens=depths,
    ):
        behind = ids.unfold(0, 1 + depths, 1)[one.rows.start + 1 : one.rows.stop + 1]
        _, chosen = forward.largest_logits(one.hidden[0].flatten(0, 1), 2**24)
        right = forward.to_target(chosen).view(len(one.rows), depths) == behind[:, 1:]
        first = torch.ones_like(right[:, :1])
        reached = torch.cat((first, right[:, :-1].cumprod(1).bool()), dim=1)
        h = one.hidden[0, ..., : geometry.hidden_size]
        read = torch.cat((h, embedding(behind[:, :-1], table, h.dtype)), dim=-1)
        inputs.append(read[reached])
        accepted.append(right[reached].float())
    width = geometry.hidden_size + geometry.markov_rank
    nothing = torch.empty(0, width, dtype=draft.dtype), torch.empty(0)
    return torch.cat([nothing[0], *inputs]), torch.cat([nothing[1], *accepted])


def trained_head(inputs: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor, float]:
    """Weight [1, W + r], bias [1] and the cross-entropy that they reach.

    Args:
        inputs: [N, W + r].
        accepted: [N] 0 or 1.
    """
    weight = inputs.new_zeros(1, inputs.shape[1]).requires_grad_()
    bias = inputs.new_zeros(1).requires_grad_()
    solver: Any = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def entropy() -> Tensor:
        logits = F.linear(inputs, weight, bias)[:, 0]
        return F.binary_cross_entropy_with_logits(logits, accepted)

    def closure() -> float:
        solver.zero_grad()
        loss = entropy() + DECAY * weight.square().sum()
        torch.autograd.backward(loss)
        return float(loss.detach())

    solver.step(closure)
    return weight.detach(), bias.detach(), float(entropy().detach())


def with_head(draft: Path, weight: Tensor, bias: Tensor, out: Path) -> None:
    """Write a copy of a draft folder that has a confidence head, in BF16.

    Args:
        draft: folder with one safetensors file and its keys at the top level of config.json.
        weight: [1, W + r] of the head.
        bias: [1] of the head.
        out: folder to create.
    """
    shutil.copytree(draft, out)
    tensors = load_file(out / "model.safetensors")
    tensors["confidence_head.proj.weight"] = weight.to(torch.bfloat16)
    tensors["confidence_head.proj.bias"] = bias.to(torch.bfloat16)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    text = json.dumps(config, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
