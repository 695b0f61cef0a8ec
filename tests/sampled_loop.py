"""Speculative sampling as an engine does it: proposals drawn, accepted or refused, round by round.

Nothing of `validate/` is used here: it is what the expectation is checked against. A proposal y of
the draft's distribution q is accepted with probability min(1, p(y) / q(y)); where it is refused the
target emits from max(0, p - q), and where all are accepted it emits one more token from p.

    python tests/sampled_loop.py [eagle3-llama ...]

compares the rounds of this loop with the expected ones on the very texts that it wrote.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.target_tables import TargetTables
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.validate.counting.trace_replay import counted_prompt
from engine_loop import CachedTarget
from proposing import draft_proposals
from reference_dflash import ReferenceDFlash
from reference_draft import ReferenceDraft, ReferenceMlaDraft
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

PAIRS = Path(__file__).parent / "pairs"
REFERENCES: dict[str, tuple[type[Any], int]] = {
    "eagle3-llama": (ReferenceDraft, 3),
    "eagle3-mla": (ReferenceMlaDraft, 3),
    "dflash": (ReferenceDFlash, 7),
}
"""Pair -> its independent draft, and K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Temperature, top-p and top-k of the target; the draft has the temperature alone."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def target(self, logits: Tensor) -> Tensor:
        """[T, V] probabilities, by transformers' own processors."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers(None, logits).softmax(-1)

    def draft(self, logits: Tensor) -> Tensor:
        """[T, V] probabilities."""
        return (logits / self.temperature).softmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRun:
    """What the loop wrote, as a trace; per verify step its row and its accepted tokens."""

    trace: PromptTrace
    steps: tuple[tuple[int, int], ...]


Propose = Callable[[Sequence[int], Tensor, Callable[[Tensor], int]], tuple[list[int], list[Tensor]]]
"""(committed tokens, features of those before the last, draw) -> K tokens, K distributions [V]."""


@torch.no_grad()
def sampled_decode(
    model: PreTrainedModel,
    propose: Propose,
    prompt: Sequence[int],
    how: Sampled,
    *,
    aux_layer_ids: Sequence[int],
    num_tokens: int,
    generator: torch.Generator,
) -> SampledRun:
    """Decode until at least `num_tokens` tokens are committed; the trace holds so many."""

    def draw(probabilities: Tensor) -> int:
        return int(torch.multinomial(probabilities, 1, generator=generator))

    target = CachedTarget(model, aux_layer_ids)
    with target.hooks:
        logits, features = target.read(prompt)
        every = how.target(logits[-1:])
        committed, laws, steps = [*prompt, draw(every[0])], [every[0]], []
        while len(committed) < num_tokens:
            last = len(committed) - 1
            drafted, drawn_from = propose(committed, features, draw)
            logits, verified = target.read([committed[-1], *drafted])
            every = how.target(logits)
            accepted = 0
            for token, q in zip(drafted, drawn_from, strict=True):
                p = every[accepted]
                if float(torch.rand((), generator=generator)) * float(q[token]) >= float(p[token]):
                    break
                accepted += 1
            left = every[accepted]
            if accepted < len(drafted):
                left = (left - drawn_from[accepted]).clamp(min=0)
            committed += [*drafted[:accepted], draw(left)]
            laws += list(every[: accepted + 1])
            features = torch.cat((features, verified[: accepted + 1]))
            target.crop(len(committed) - 1)
            steps.append((last - 1, accepted))
    start = len(prompt)
    token_ids = torch.tensor(committed[:num_tokens])
    emitted = torch.stack([law[t] for law, t in zip(laws, committed[start:], strict=True)])
    trace = PromptTrace(
        id="sampled",
        category="a",
        prompt_length=start,
        token_ids=token_ids,
        features=features[: num_tokens - 1],
        target_top1=torch.full((num_tokens - 1,), -1),
        token_logprob=emitted.log()[: num_tokens - start],
    )
    return SampledRun(trace=trace, steps=tuple(steps))


def proposer(draft: LoadedDraft, reference: Any, how: Sampled, num_draft_tokens: int) -> Propose:
    """Draws from the independent draft, for a new prompt."""
    independent = reference(draft.geometry, draft.weights)
    known = 0  # rows of the draft's cache that were computed from true features

    def in_target(law: Tensor) -> Tensor:
        if independent.d2t is None:
            return law
        ids = torch.arange(len(law)) + independent.d2t
        return torch.zeros(draft.geometry.vocab_size, dtype=law.dtype).scatter(0, ids, law)

    def block(committed: Sequence[int], features: Tensor, draw: Callable[[Tensor], int]) -> Any:
        nonlocal known
        independent.extend(features[None, known:])
        known = len(features)
        logits = independent.propose(committed[-1], num_draft_tokens)
        laws = [in_target(law) for law in how.draft(logits)]
        return [draw(law) for law in laws], laws

    def chain(committed: Sequence[int], features: Tensor, draw: Callable[[Tensor], int]) -> Any:
        nonlocal known
        independent.crop(known)
        tokens = torch.tensor([committed[known + 1 :]])
        logits, hidden = independent.extend(tokens, independent.fuse(features[None, known:]), known)
        known = len(committed) - 1
        drafted: list[int] = []
        laws: list[Tensor] = []
        while True:
            laws.append(in_target(how.draft(logits[0, -1:])[0]))
            drafted.append(draw(laws[-1]))
            if len(drafted) == num_draft_tokens:
                return drafted, laws
            logits, hidden = independent.extend(
                torch.tensor([[drafted[-1]]]), hidden[:, -1:], len(committed) - 2 + len(drafted)
            )

    return block if reference is ReferenceDFlash else chain


def compare(
    pair: str, how: Sampled, *, num_prompts: int | None, num_new_tokens: int, seed: int
) -> Tensor:
    """[prompts, 2, 2]: rounds and accepted tokens, counted in the loop and expected by replay.

    The loop runs on the prompts of a shipped pair, replay on the texts that it wrote.
    """
    reference, num_draft_tokens = REFERENCES[pair]
    folder, found = PAIRS / pair, []
    draft = load_draft(folder / "draft", shared=TargetTables.find(folder / "target").shared())
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for line in (folder / "prompts.jsonl").read_text("utf-8").splitlines()[:num_prompts]:
        prompt = json.loads(line)["token_ids"]
        propose = proposer(draft, reference, how, num_draft_tokens)
        ids, end = draft.geometry.aux_layer_ids or (), len(prompt) + num_new_tokens
        run = sampled_decode(
            model, propose, prompt, how, aux_layer_ids=ids, num_tokens=end, generator=generator
        )
        hidden = draft.forward.fuse(run.trace.features[None])[0]
        given: Any = {"num_draft_tokens": num_draft_tokens, "temperature": how.temperature}
        given["first_row"] = run.trace.prompt_length - 1
        proposals = draft_proposals(draft.forward, hidden, run.trace.token_ids, **given)
        expected = counted_prompt(run.trace, proposals).counts
        last_row = run.trace.num_tokens - 2 - num_draft_tokens
        online = [count for row, count in run.steps if row <= last_row]
        rounds = (len(online), expected.num_steps)
        found.append((rounds, (sum(online), expected.num_accepted_draft_tokens)))
    return torch.tensor(found, dtype=torch.float64)


def difference(pairs: Tensor) -> tuple[float, float]:
    """Mean of counted minus expected over the prompts, and its standard error."""
    differences = pairs[:, 0] - pairs[:, 1]
    return float(differences.mean()), float(differences.std()) / math.sqrt(len(pairs))


def main() -> None:
    """Print one row per pair and way of sampling."""
    ways = (Sampled(), Sampled(temperature=0.6, top_p=0.95), Sampled(temperature=0.8, top_k=20))
    for name in sys.argv[1:] or REFERENCES:
        for how in ways:
            found = compare(name, how, num_prompts=None, num_new_tokens=96, seed=0)
            (counted, expected), accepted = found.sum(0)
            lengths = [f"{1 + one:.4f}" for one in (accepted / found.sum(0)[0]).tolist()]
            mean, error = difference(found[:, 0])
            print(f"{name}, {how}, {len(found)} prompts: counted {counted:,.0f} rounds, length"
                  f" {lengths[0]}; expected {expected:,.1f}, {lengths[1]};"
                  f" difference per prompt {mean:+.3f} +- {error:.3f} rounds")  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
