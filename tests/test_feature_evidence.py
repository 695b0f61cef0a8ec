"""Features that are not those of the tokens beside them are seen: by the tokens, by a head."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces import feature_evidence
from draftquant.calibration.traces.feature_evidence import FeatureEvidence, FeatureTally
from draftquant.calibration.traces.head_agreement import head_agreement
from draftquant.calibration.traces.manifest import TraceEntry
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.target_tables import FINAL_NORM, SharedTables, TargetTables
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.stored_tables import HEAD
from recorded import record_traces
from tied_pair import NUM_LAYERS, prompt_tokens, save_target
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
        features = (5.0 + table[ids[:-1]] + 0.5 * table[ids[:-1].roll(1)] + noise).bfloat16()
        named: dict[str, Any] = {"id": f"p{i}", "category": "a", "prompt_length": 10}
        found.append(PromptTrace(**named, token_ids=ids, features=features, target_top1=ids[1:]))
    return found


def evidence(change: Callable[[int, Tensor], Tensor], count: int = PROMPTS) -> FeatureEvidence:
    tally = FeatureTally()
    for i, trace in enumerate(traces()[:count]):
        tally.add(dataclasses.replace(trace, features=change(i, trace.features)))
    return tally.evidence()


def test_features_of_their_own_tokens() -> None:
    """Variances 1 (token), 0.25 (the one before) and 1 (noise): shares 1 / 2.25 and 0.25 / 2.25."""
    found = evidence(lambda _, features: features)
    assert (found.fault(), found.checked) == (None, True)
    assert found.share[0] == pytest.approx(1 / 2.25, abs=0.05)
    assert found.share[-1] == pytest.approx(0.25 / 2.25, abs=0.05)
    for shift in (-2, 1, 2):
        assert found.share[shift] == pytest.approx(0, abs=0.03)
    assert found.repeats == PROMPTS * (TOKENS - 1 - 4) - VOCAB


def late(features: Tensor, start: int) -> Tensor:
    return torch.cat([features[:start], features[start - 1 : -1]])


OTHERS: tuple[tuple[Callable[[int, Tensor], Tensor], str], ...] = (
    (lambda _, f: torch.zeros_like(f), "are all equal"),
    (lambda i, f: torch.full_like(f, float(i)), "do not belong to the tokens"),
    (lambda i, _: traces()[(i + 1) % PROMPTS].features, "do not belong to the tokens"),
    (lambda _, f: f.flip(0), "do not belong to the tokens"),
    (lambda _, f: f.roll(1, 0), r"^the recorded features are shifted by -1 against"),
    (lambda _, f: f.roll(-2, 0), r"^the recorded features are shifted by \+2 against"),
    (lambda _, f: late(f, 140), "at positions 128 to 191 the .* are shifted by -1"),
    (lambda i, f: late(f, 120) if i == 3 else f, "in 1 of 6 .* 'p3' at positions 1[12]. to 198"),
    (lambda i, f: f.flip(0) if i in (1, 5) else f, "in 2 of 6 texts .*'p1' .* 'p5' at pos"),
)


@pytest.mark.parametrize(("change", "problem"), OTHERS)
def test_others_are_named(change: Callable[[int, Tensor], Tensor], problem: str) -> None:
    assert re.search(problem, str(evidence(change).fault()))


def test_little_text_says_nothing_and_of_much_some_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second one of 6, then of these every second: 0 and 4."""
    found = evidence(lambda _, f: f.flip(0), count=2)
    assert found.repeats < 500
    assert (found.checked, found.fault()) == (False, None)
    assert FeatureTally().evidence().repeats == 0
    monkeypatch.setattr(feature_evidence, "MOST_ROWS", 2 * (TOKENS - 1))
    found = evidence(lambda i, f: f if i in (0, 4) else f.flip(0))
    assert found.repeats < 500
    assert found.share[0] == pytest.approx(1 / 2.25, abs=0.1)


# ---- the target's head on the recorded last layer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("head") / "target")


def recorded(target: Path, out: Path, last_layer: int) -> TraceFolder:
    tokens = enumerate(prompt_tokens(4, 9))
    prompts = [Prompt(id=f"p{i}", category="a", token_ids=ids) for i, ids in tokens]
    asked: dict[str, Any] = {"max_new_tokens": 20, "aux_layer_ids": (0, 1, last_layer)}
    return record_traces(target, prompts, out, table_ids=(), **asked)


def test_the_head_reproduces_what_was_recorded_or_not(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = recorded(target, tmp_path / "traces", NUM_LAYERS - 1)
    tables, load = read.tables(), TraceFolder.load
    assert head_agreement(read, tables) == 1.0
    assert head_agreement(read, TargetTables.find(target).shared()) == 1.0
    # norms of one plus the weight are tried
    gemma = SharedTables({HEAD: lambda: tables[HEAD], FINAL_NORM: lambda: tables[FINAL_NORM] - 1})
    assert head_agreement(read, gemma) == 1.0
    other = TargetTables.find(save_target(tmp_path / "other", seed=1)).shared()
    assert (head_agreement(read, other) or 1) < 0.5
    # nothing is said where something is not at hand
    assert head_agreement(read, SharedTables({HEAD: lambda: tables[HEAD]})) is None
    before_last = recorded(target, tmp_path / "before", NUM_LAYERS - 2)
    assert head_agreement(before_last, before_last.tables()) is None

    def late(self: TraceFolder, entry: TraceEntry) -> PromptTrace:
        trace = load(self, entry)
        return dataclasses.replace(trace, features=trace.features.roll(1, 0))

    monkeypatch.setattr(TraceFolder, "load", late)
    agreement = head_agreement(read, tables)
    assert agreement is not None
    assert agreement < 0.5
