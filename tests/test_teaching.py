"""What the target teaches: the loss in one expression, weights that learn, which step stays."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftquant.calibration.errors import CalibrationError
from draftquant.calibration.rounding import proposal_divergence as divergence
from draftquant.calibration.rounding.learned_state import KeptRounding
from draftquant.calibration.rounding.learning_settings import RETUNING, LearningSettings, Teaching
from draftquant.calibration.rounding.plain_weight import PlainWeight
from draftquant.calibration.rounding.proposal_divergence import backward_of_divergence
from draftquant.calibration.rounding.sequences import split_prompts
from draftquant.calibration.rounding.validation import Validation, best_of
from rounding_pairs import RoundingPair, make_pair
from test_divergence import WEIGHTS, Drafts, all_logits, recorded
from test_kept_rounding import seen
from test_trace_sets import plain, write

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TEACHING = Teaching(temperature=0.5, anchor=3.0, min_prompts=4)


@pytest.fixture(scope="module", params=["llama", "dflash"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RoundingPair:
    return make_pair(tmp_path_factory.mktemp("taught") / request.param, request.param)


# ---- the loss


@pytest.mark.parametrize("max_logits", [1, 2**26])
def test_loss_and_gradient_are_those_of_one_expression(
    max_logits: int, pair: RoundingPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cross-entropy at temperature 0.5 plus 3 KL; depths behind a miss of its own count less."""
    monkeypatch.setattr(divergence, "MAX_LOGITS", max_logits)
    drafts = Drafts(pair)
    for name, w in drafts.noisy.items():  # so much that it is wrong where the other one is right
        drafts.noisy[name] = w + 3 * (w - drafts.draft.weights[name])
    own = {name: w.clone().requires_grad_() for name, w in drafts.noisy.items()}
    loss = backward_of_divergence(
        drafts.over(own), drafts.over({}), drafts.sequence,
        num_draft_tokens=drafts.k, weights=WEIGHTS, share=0.5, teaching=TEACHING,
    )  # fmt: skip

    wanted = {name: w.clone().requires_grad_() for name, w in drafts.noisy.items()}
    logits = all_logits(drafts.over(wanted), drafts.sequence, drafts.k)
    with torch.no_grad():
        t = all_logits(drafts.over({}), drafts.sequence, drafts.k).log_softmax(-1)
    tokens = recorded(drafts.sequence, drafts.k)
    hits = (logits.argmax(-1) == tokens).float()
    assert 0 < hits.mean() < 1
    assert not torch.equal(hits, (t.argmax(-1) == tokens).float())  # whose hits is told apart
    kl = (t.exp() * (t - logits.log_softmax(-1))).sum(-1)
    likely = (logits / 0.5).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    total, norm = torch.zeros(()), 0.0
    for j in range(drafts.k):
        reach = torch.where(hits[:, :j].all(1), 1.0, WEIGHTS.missed)
        total = total + WEIGHTS.decay**j * (reach * (3.0 * kl - likely)[:, j]).sum()
        norm += WEIGHTS.decay**j * len(hits)
    whole = 0.5 * total / norm
    whole.backward()
    assert float(loss) == pytest.approx(float(whole.detach()), rel=1e-4)
    for name, weight in wanted.items():
        assert own[name].grad is not None
        assert weight.grad is not None
        largest = float(weight.grad.abs().max())
        torch.testing.assert_close(own[name].grad, weight.grad, rtol=0, atol=1e-4 * largest)


def test_a_token_that_the_draft_cannot_propose_teaches_nothing() -> None:
    """Draft ids 0, 1, 2 are the target's 5, 7, 2; of token 6 there is none."""
    forward: Any = SimpleNamespace(
        num_logits=3,
        geometry=SimpleNamespace(vocab_size=8),
        to_target=lambda ids: torch.tensor([5, 7, 2])[ids],
    )
    draft_ids = divergence._draft_ids(forward, CPU)
    assert draft_ids.tolist() == [-1, -1, 2, -1, -1, 0, -1, 1]
    logits = torch.tensor([[[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], [[3.0, 0.0, 0.0], [0.0] * 3]])
    found = divergence._surprise(logits, draft_ids[torch.tensor([[7, 6], [5, 2]])])
    one = math.log(1 + math.e + math.e**2) - 1
    torch.testing.assert_close(
        found, torch.tensor([[one, 0.0], [math.log(math.e**3 + 2) - 3, math.log(3)]])
    )


# ---- a weight that stays unquantized


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_has_not_moved_is_stored_bit_for_bit(dtype: torch.dtype) -> None:
    weight = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] = 0  # a row without a magnitude
    weight[4] *= 1e-3
    one = PlainWeight(weight, device=CPU)
    assert torch.equal(one.parts()["weights"], weight)
    assert one.parts()["weights"].dtype == dtype
    assert torch.equal(one.dequantized(), weight.float())
    one.keep_within_reach()
    assert torch.equal(one.parts()["weights"], weight)


def test_units_are_near_those_of_int4_and_the_gradient_is_of_them() -> None:
    """Row 0: 6 / 7.5 = 0.8 is nearest to 1, row 1: 3 / 7.5 = 0.4 to 0.5."""
    weight = torch.tensor([[6.0, 1.0], [-3.0, 1.0]])
    one = PlainWeight(weight, device=CPU)
    assert one.codes.tolist() == [[6.0, 1.0], [-6.0, 2.0]]
    one.dequantized().sum().backward()
    assert one.codes.grad is not None
    assert one.codes.grad.tolist() == [[1.0, 1.0], [0.5, 0.5]]


def test_what_is_multiplied_is_what_is_stored() -> None:
    one = PlainWeight(torch.randn(4, 8).to(torch.bfloat16), device=CPU)
    with torch.no_grad():
        one.codes += 0.37 * torch.randn(4, 8)
    assert torch.equal(one.dequantized(), one.parts()["weights"].float())


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    kept = KeptRounding(tmp_path)
    weight = torch.randn(3, 4).to(torch.bfloat16)
    kept.save_codes(7, {"layers.0.x": PlainWeight(weight, device=CPU).parts()})
    assert torch.equal(kept.weight(7, "layers.0.x"), weight)
    with pytest.raises(CalibrationError, match=r"no learned weights of layers\.1\.x"):
        kept.weight(7, "layers.1.x")
    with pytest.raises(CalibrationError, match=r"no learned codes of layers\.0\.x"):
        kept.codes(7, "layers.0.x", None)


# ---- which step stays


def test_with_a_teacher_acceptance_alone_decides() -> None:
    """A gain that chance may give, at less overlap: learned codes stay, taught ones move on."""

    def look(step: int, accepted: tuple[int, ...], overlap: float) -> Validation:
        return Validation(
            step=step, rows=(100,) * 4, accepted=accepted, overlap=overlap, unquantized=3.0
        )

    looks = [look(0, (250,) * 4, 0.95), look(10, (312, 232, 232, 232), 0.94)]
    assert best_of(looks, LearningSettings(max_overlap_drop=0.05)).step == 0
    assert best_of(looks, RETUNING).step == 10
    more_overlap = look(20, looks[-1].accepted, 0.99)
    assert best_of([*looks, more_overlap], LearningSettings(max_overlap_drop=0.05)).step == 20
    assert best_of([looks[1], looks[0]], RETUNING).step == 10


def test_overlap_stays_a_constraint() -> None:
    drop = RETUNING.max_overlap_drop
    looks = [seen(0, 2.5, 0.95), seen(10, 2.9, 0.949 - drop), seen(20, 2.6, 0.951 - drop)]
    assert best_of(looks, RETUNING).step == 20
    assert best_of(looks[:2], RETUNING).step == 0


# ---- how many prompts


def test_enough_prompts_must_be_left_to_learn_from(tmp_path: Path) -> None:
    traces = write(tmp_path / "t", plain(20))
    assert len(split_prompts(traces, 3, share=0.2, seed=0, min_learned=16).learned) == 16
    with pytest.raises(CalibrationError) as caught:
        split_prompts(traces, 3, share=0.2, seed=0, min_learned=17)
    assert "expected at least 17 prompts to learn from, got 16, with 4 more" in caught.value.what
    assert "on fewer overfits" in caught.value.what
    assert "2.71 % less" in caught.value.what
    assert caught.value.fix == "record more prompts: 22 or more"


def test_the_settings_are_those_that_the_page_measured() -> None:
    """Its figures are of these; others need figures of their own."""
    text = (Path(__file__).parents[1] / "docs" / "retune.md").read_text(encoding="utf-8")
    text = " ".join(text.split())
    teaching = RETUNING.teaching
    assert teaching is not None
    assert f"logits divided by {teaching.temperature:g})" in text
    assert f"{teaching.anchor:g} x KL(BF16 draft ‖ draft)" in text
    assert f"At least {teaching.min_prompts} prompts must remain for training" in text
