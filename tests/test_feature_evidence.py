"""Features that are not those of the tokens beside them are seen, without target and draft."""

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from draftquant.calibration.traces import trace_info as feature_evidence
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.trace_info import FeatureEvidence, FeatureTally
from torch import Tensor

VOCAB, WIDTH, PROMPTS, TOKENS = 40, 96, 6, 200


def traces() -> list[PromptTrace]:
    """Features as a residual stream has them: the token's own, some of the one before, noise."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn((VOCAB, WIDTH), generator=generator)
    found = []
    for i in range(PROMPTS):
        ids = torch.randint(VOCAB, (TOKENS,), generator=generator)
        noise = torch.randn((TOKENS - 1, WIDTH), generator=generator)
        before = table[ids[:-1].roll(1)]
        features = 5.0 + table[ids[:-1]] + 0.5 * before + noise
        found.append(
            PromptTrace(
                id=f"p{i}",
                category="a",
                prompt_length=10,
                token_ids=ids,
                features=features.bfloat16(),
                target_top1=ids[1:],
            )
        )
    return found


def evidence(change: Callable[[int, Tensor], Tensor], count: int = PROMPTS) -> FeatureEvidence:
    tally = FeatureTally()
    for i, trace in enumerate(traces()[:count]):
        tally.add(dataclasses.replace(trace, features=change(i, trace.features)))
    return tally.evidence()


def test_features_of_their_own_tokens() -> None:
    """Variances 1 (token), 0.25 (the one before) and 1 (noise): shares 1 / 2.25 and 0.25 / 2.25."""
    found = evidence(lambda _, features: features)
    assert found.fault() is None
    assert found.checked
    assert found.share[0] == pytest.approx(1 / 2.25, abs=0.05)
    assert found.share[-1] == pytest.approx(0.25 / 2.25, abs=0.05)
    for shift in (-2, 1, 2):
        assert found.share[shift] == pytest.approx(0, abs=0.03)
    assert found.repeats == PROMPTS * (TOKENS - 1 - 4) - VOCAB


def late(features: Tensor, start: int) -> Tensor:
    return torch.cat([features[:start], features[start - 1 : -1]])


OTHERS: tuple[tuple[Callable[[int, Tensor], Tensor], str], ...] = (
    (lambda _, f: torch.zeros_like(f), "are all equal"),
    (lambda i, _: traces()[(i + 1) % PROMPTS].features, "do not belong to the tokens"),
    (lambda _, f: f.flip(0), "do not belong to the tokens"),
    (lambda _, f: f.roll(1, 0), r"shifted by -1 against their tokens"),
    (lambda _, f: f.roll(-2, 0), r"shifted by \+2 against their tokens"),
    (lambda _, f: late(f, 140), "at positions 128 to 191 the .* are shifted by -1"),
    (lambda i, f: late(f, 120) if i == 3 else f, "in 1 of 6 .* 'p3' at positions 1[12]. to 198"),
    (lambda i, f: f.flip(0) if i in (1, 4) else f, "in 2 of 6 texts .*'p1' .* 'p4' at pos"),
)


def test_others_are_named() -> None:
    for change, problem in OTHERS:
        found = evidence(change).fault()
        assert found is not None
        assert re.search(problem, found)


def test_a_constant_within_each_prompt_is_not_constant() -> None:
    found = evidence(lambda i, f: torch.full_like(f, float(i)))
    assert not found.constant
    assert found.fault() is not None


def test_too_little_text_says_nothing() -> None:
    found = evidence(lambda _, f: f.flip(0), count=2)
    assert found.repeats < 500
    assert (found.checked, found.fault()) == (False, None)
    nothing = FeatureTally().evidence()
    assert nothing.repeats == 0


def test_of_many_prompts_some_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second one of 6, then of these every second: 0 and 4."""
    monkeypatch.setattr(feature_evidence, "MOST_ROWS", 2 * (TOKENS - 1))
    found = evidence(lambda i, f: f if i in (0, 4) else f.flip(0))
    assert found.repeats < 500
    assert found.share[0] == pytest.approx(1 / 2.25, abs=0.1)


def test_elements_that_never_vary_do_not_count() -> None:
    def half_dead(_: int, features: Tensor) -> Tensor:
        return torch.cat([features[:, :48], torch.full_like(features[:, 48:], 7.0)], dim=1)

    whole, half = evidence(lambda _, f: f), evidence(half_dead)
    assert half.share[0] == pytest.approx(whole.share[0], abs=0.05)
    assert half.fault() is None
