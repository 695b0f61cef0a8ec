"""The divergence of two drafts, part by part, against the whole of it in one expression."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from draftquant.calibration.rounding import proposal_divergence as divergence
from draftquant.calibration.rounding.learned_state import LearningSettings
from draftquant.calibration.rounding.proposal_divergence import (
    Agreement,
    agreement,
    backward_of_divergence,
    passes_of,
)
from draftquant.calibration.rounding.sequences import LearningSequences, SequenceReader
from draftquant.calibration.traces.manifest import TraceEntry
from draftquant.calibration.traces.sets import copy_traces
from draftquant.quantize.drafts.forward import DraftForward, checked_at_the_end, finite
from draftquant.recipes.errors import ForwardError
from rounding_pairs import K, RoundingPair, shared_pair
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = LearningSettings(depth_decay=0.7, missed_weight=0.25)


@pytest.fixture(scope="module", params=["llama", "dflash"])
def pair(request: pytest.FixtureRequest) -> RoundingPair:
    return shared_pair(request.param)


class Drafts:
    """A draft, the same with noise on its linears, and rows 6, 8, 10, ... of a prompt."""

    def __init__(self, pair: RoundingPair) -> None:
        self.k = K[pair.family]
        self.draft = pair.loaded()
        generator = torch.Generator().manual_seed(0)
        self.noisy = {
            f"{name}.weight": w + 0.3 * w.std() * torch.randn(w.shape, generator=generator)
            for name in self.draft.linears
            if (w := self.draft.weights[f"{name}.weight"]) is not None
        }
        traces = pair.traces
        entry = traces.manifest.prompts[0]
        rows = range(6, entry.num_tokens - 1 - self.k, 2)
        self.sequence = SequenceReader(self.draft, traces).read([entry], [rows])

    def over(self, weights: dict[str, Tensor]) -> DraftForward:
        return self.draft.family.forward(
            self.draft.geometry, {**self.draft.weights, **weights}, lambda _name, x: x
        )


def all_logits(forward: DraftForward, sequence: LearningSequences, k: int) -> Tensor:
    """[R, K, V]."""
    passes = list(passes_of(forward, sequence, k))
    assert all(one.rows == sequence.rows for one in passes)
    return torch.cat([forward.logits(one.hidden[0]) for one in passes], dim=1)


@pytest.mark.parametrize("max_logits", [500, 2**26])
def test_loss_and_gradient_are_those_of_one_expression(
    max_logits: int, pair: RoundingPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "MAX_LOGITS", max_logits)
    drafts = Drafts(pair)
    own = {name: w.clone().requires_grad_() for name, w in drafts.noisy.items()}
    reference = drafts.over({})
    loss = backward_of_divergence(
        drafts.over(own), reference, drafts.sequence,
        num_draft_tokens=drafts.k, settings=WEIGHTS, share=0.5,
    )  # fmt: skip

    wanted = {name: w.clone().requires_grad_() for name, w in drafts.noisy.items()}
    q = all_logits(drafts.over(wanted), drafts.sequence, drafts.k).log_softmax(-1)
    with torch.no_grad():
        t = all_logits(reference, drafts.sequence, drafts.k)
    ids, rows = drafts.sequence.token_ids[0], drafts.sequence.rows
    recorded = torch.stack([ids[row + 2 : row + 2 + drafts.k] for row in rows])
    hits = (t.argmax(-1) == recorded).float()
    assert 0 < hits.mean() < 1  # both kinds of weights occur
    kl = torch.nn.functional.kl_div(q, t.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    total, norm = torch.zeros(()), 0.0
    for j in range(drafts.k):
        total = total + 0.7**j * (torch.where(hits[:, :j].all(1), 1.0, 0.25) * kl[:, j]).sum()
        norm += 0.7**j * len(hits)
    whole = 0.5 * total / norm
    whole.backward()
    assert float(loss) == pytest.approx(float(whole.detach()), rel=1e-4)
    for name, weight in wanted.items():
        assert own[name].grad is not None
        assert weight.grad is not None
        largest = float(weight.grad.abs().max())
        torch.testing.assert_close(own[name].grad, weight.grad, rtol=0, atol=1e-4 * largest)


def test_sequences_of_any_length_run_together_as_alone(pair: RoundingPair, tmp_path: Path) -> None:
    """Rows begin and end elsewhere in each prompt; what fills shorter ones up counts nowhere."""
    drafts = Drafts(pair)
    shorter = [
        dataclasses.replace(
            trace,
            token_ids=trace.token_ids[:cut],
            features=trace.features[: cut - 1],
            target_top1=trace.target_top1[: cut - 1],
            token_logprob=None,
        )
        for trace, cut in zip(pair.traces, (26, 18, 21), strict=False)
    ]
    traces = copy_traces([pair.traces], tmp_path / "ragged", shorter)
    prompts = traces.manifest.prompts
    rows = [range(6 + 2 * i, x.num_tokens - 1 - drafts.k, 2) for i, x in enumerate(prompts)]
    assert len({(own.start, own.stop) for own in rows}) == 3
    reader = SequenceReader(drafts.draft, traces)
    noisy, reference = drafts.over(drafts.noisy), drafts.over({})

    def alike(entries: Sequence[TraceEntry], rows: list[range]) -> tuple[float, list[Agreement]]:
        sequences = reader.read(entries, rows)
        loss = backward_of_divergence(
            drafts.over(own), reference, sequences,
            num_draft_tokens=drafts.k, settings=WEIGHTS, share=0.5,
        )  # fmt: skip
        return float(loss), agreement(noisy, reference, sequences, num_draft_tokens=drafts.k)

    own = {name: w.clone().requires_grad_() for name, w in drafts.noisy.items()}
    loss, together = alike(prompts, rows)
    gradients = {name: weight.grad for name, weight in own.items()}
    own = {name: w.clone().requires_grad_() for name, w in drafts.noisy.items()}
    alone = [alike([entry], [one]) for entry, one in zip(prompts, rows, strict=True)]
    sequences = reader.read(prompts, rows)
    itself = agreement(reference, reference, sequences, num_draft_tokens=drafts.k)
    assert [one.accepted for one in itself] == [one.accepted_reference for one in together]
    other_head = drafts.over({"lm_head.weight": -drafts.draft.weights["lm_head.weight"]})
    assert agreement(other_head, reference, sequences, num_draft_tokens=drafts.k) == itself
    assert loss == pytest.approx(sum(one for one, _ in alone), rel=1e-5)
    for found, (_, (wanted,)) in zip(together, alone, strict=True):
        assert (found.rows, found.accepted) == (wanted.rows, wanted.accepted)
        assert found.accepted_reference == wanted.accepted_reference
        assert found.overlap == pytest.approx(wanted.overlap, rel=1e-5)
    for name, weight in own.items():
        assert weight.grad is not None
        largest = float(weight.grad.abs().max())
        torch.testing.assert_close(gradients[name], weight.grad, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_said_at_the_end_first_things_first(broken: float) -> None:
    values = torch.tensor([1.0, broken])
    reached = []

    def look() -> None:
        with checked_at_the_end():
            finite(values[:1], "step 1")
            reached.append(finite(values, "step 2", "logits"))
            finite(values / 0, "step 3")

    with pytest.raises(ForwardError, match="step 2: logits are NaN"):
        look()
    assert len(reached) == 1
    with pytest.raises(ForwardError, match="hidden states"):
        finite(values, "step 4")
