"""How a target's text is continued: the distribution drawn from, and what is recorded of it."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.decoding import (
    Decoding,
    choose,
    processed_logprobs,
    prompt_draws,
    prompt_seed,
)
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.recipes.errors import TraceError
from recorded import record_traces
from tied_pair import prompt_tokens, save_target
from transformers import (
    AutoModelForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

LOGITS = torch.randn((5, 64), generator=torch.Generator().manual_seed(0)) * 3


def test_the_distribution_is_that_of_transformers() -> None:
    values = itertools.product([0.3, 1.0, 1.7], [1.0, 0.9, 0.5, 1e-6], [0, 1, 10, 64, 100])
    for temperature, top_p, top_k in values:
        expected = TemperatureLogitsWarper(temperature)(None, LOGITS)
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        expected = TopPLogitsWarper(top_p)(None, expected)
        decoding = Decoding(temperature=temperature, top_p=top_p, top_k=top_k)
        got = processed_logprobs(LOGITS, decoding)
        torch.testing.assert_close(got, expected.log_softmax(-1))
        assert torch.equal(got == -torch.inf, expected == -torch.inf)


def test_draws_have_the_law_that_is_recorded() -> None:
    """A chi-squared test of 20,000 draws of one row, at a level of one in a thousand."""
    from scipy import stats

    decoding = Decoding(temperature=3.0, top_p=0.95)
    rows = 20_000
    logits = LOGITS[:1].expand(rows, -1)
    draws = torch.cat([prompt_draws(decoding, (i,), 1) for i in range(rows)])
    chosen = choose(decoding, logits, logits.argmax(-1), draws)
    logprobs = processed_logprobs(LOGITS[:1], decoding)[0]
    assert torch.equal(chosen["token_logprob"], logprobs[chosen["token_ids"]])
    expected = logprobs.double().exp() * rows
    found = torch.bincount(chosen["token_ids"], minlength=64).double()
    assert bool((found[expected == 0] == 0).all())
    kept = expected > 0
    assert int(kept.sum()) > 10
    assert stats.chisquare(found[kept], expected[kept] * rows / expected.sum()).pvalue > 1e-3


def test_a_prompt_draws_by_its_own_numbers() -> None:
    """One after the other, as many as are asked for; others for another prompt or seed."""
    decoding = Decoding(temperature=1.0, seed=3)
    many = prompt_draws(decoding, (1, 2), 40)
    assert torch.equal(prompt_draws(decoding, (1, 2), 7), many[:7])
    stream = torch.Generator().manual_seed(prompt_seed(3, (1, 2)))
    singly = [torch.rand(1, generator=stream, dtype=torch.float64) for _ in range(40)]
    assert torch.equal(torch.cat(singly), many)
    assert not torch.equal(prompt_draws(decoding, (1, 3), 40), many)
    assert not torch.equal(prompt_draws(Decoding(temperature=1.0, seed=4), (1, 2), 40), many)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("decoding") / "target")


PROMPTS = [
    Prompt(id=f"p{i}", category="a", token_ids=ids) for i, ids in enumerate(prompt_tokens(3, 9))
]


def recorded(
    target: Path, out: Path, decoding: Decoding, new: int = 12, batch_size: int = 3
) -> TraceFolder:
    given: Any = {"aux_layer_ids": (0, 1, 2), "batch_size": batch_size}
    return record_traces(target, PROMPTS, out, max_new_tokens=new, decoding=decoding, **given)


def test_sampled_traces_hold_the_probabilities_that_were_drawn_from(
    target: Path, tmp_path: Path
) -> None:
    """Against the target itself, which reads the recorded text again."""
    decoding = Decoding(temperature=0.7, top_p=0.9, top_k=20, num_top_logprobs=2)
    traces = recorded(target, tmp_path / "traces", decoding)
    assert traces.manifest.temperature == 0.7
    assert traces.manifest.logprobs_as_sampled
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    drawn = 0
    for trace in traces:
        with torch.inference_mode():
            logits = model(trace.token_ids[None]).logits[0, :-1]
        assert torch.equal(logits.argmax(-1), trace.target_top1)
        start = trace.prompt_length
        logprobs = processed_logprobs(logits[start - 1 :], decoding)
        emitted = trace.token_ids[start:]
        expected = logprobs.gather(1, emitted[:, None])[:, 0]
        assert trace.token_logprob is not None
        assert trace.top_logprobs is not None
        torch.testing.assert_close(trace.token_logprob, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(trace.top_logprobs, logprobs.topk(2).values, atol=1e-4, rtol=0)
        drawn += int((emitted != trace.target_top1[start - 1 :]).sum())
    assert drawn > 0


def test_the_seed_and_the_batch_say_all(target: Path, tmp_path: Path) -> None:
    def texts(name: str, batch_size: int, seed: int) -> list[tuple[int, ...]]:
        decoding = Decoding(temperature=1.0, seed=seed)
        traces = recorded(target, tmp_path / name, decoding, batch_size=batch_size)
        return [trace.continuation for trace in traces]

    first = texts("a", 1, 0)
    assert texts("b", 3, 0) == first
    assert texts("c", 1, 1) != first


def test_values_out_of_range() -> None:
    changes: dict[str, Any]
    for changes, where in (
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p"),
        ({"temperature": 1.0, "top_p": 1.1}, "--top-p"),
        ({"temperature": 1.0, "top_k": -1}, "--top-k"),
        ({"num_top_logprobs": -1}, "--top-logprobs"),
        ({"top_p": 0.9}, "--temperature"),
        ({"top_k": 5}, "--temperature"),
    ):
        with pytest.raises(TraceError, match=r"expected|greedy") as caught:
            dataclasses.replace(Decoding(), **changes)
        assert caught.value.where == where
