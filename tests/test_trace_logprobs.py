"""Traces of sampled text, and log-probabilities beside the tokens: round trip and refusals."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.traces.manifest import LogprobSpec, Sampling, TraceManifest
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.traces.writer import trace_output
from draftquant.recipes.errors import TraceError
from test_traces import AUX, TARGET, make_trace, put, rewrite

SPEC = LogprobSpec(kind="processed", num_top=3)
SAMPLING = Sampling(top_p=0.9, top_k=40, seed=7)


def sampled_trace(name: str = "a") -> PromptTrace:
    """Six new tokens, the target's argmax known of none."""
    trace = make_trace(name)
    generator = torch.Generator().manual_seed(1)
    return dataclasses.replace(
        trace,
        target_top1=torch.full_like(trace.target_top1, -1),
        token_logprob=-torch.rand(6, generator=generator),
        top_token_ids=torch.randint(50, (6, 3), generator=generator),
        top_logprobs=-torch.rand((6, 3), generator=generator),
    )


def write(out: Path, trace: PromptTrace, logprobs: LogprobSpec | None = SPEC) -> TraceFolder:
    head = TraceManifest(
        target=TARGET,
        features=AUX,
        temperature=0.6,
        sampling=SAMPLING,
        logprobs=logprobs,
        recorded_by="vllm 0.32.0",
    )
    with trace_output(out, head) as writer:
        writer.add(trace, position=0)
    return TraceFolder.open(out)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    trace = sampled_trace()
    traces = write(tmp_path / "traces", trace)
    (read,) = traces
    for field in dataclasses.fields(trace):
        given, found = getattr(trace, field.name), getattr(read, field.name)
        if isinstance(given, torch.Tensor):
            assert torch.equal(given, found)
            assert given.dtype == found.dtype
        else:
            assert given == found
    manifest = traces.manifest
    assert (manifest.temperature, manifest.sampling) == (0.6, SAMPLING)
    assert (manifest.logprobs, manifest.recorded_by) == (SPEC, "vllm 0.32.0")
    assert manifest.sampled
    assert manifest.logprobs_as_sampled


def test_a_greedy_trace_may_leave_the_argmax_of_prompts_open(tmp_path: Path) -> None:
    trace = make_trace("a")
    trace.target_top1[: trace.prompt_length - 1] = -1
    with trace_output(tmp_path / "open", GREEDY.manifest(TARGET, AUX)) as writer:
        writer.add(trace, position=0)
    (read,) = TraceFolder.open(tmp_path / "open")
    assert torch.equal(read.target_top1, trace.target_top1)
    trace.target_top1[-1] = -1
    with (
        pytest.raises(TraceError, match="not greedy"),
        trace_output(tmp_path / "out", GREEDY.manifest(TARGET, AUX)) as writer,
    ):
        writer.add(trace, position=0)


@pytest.mark.parametrize(
    ("kind", "temperature", "sampling", "as_sampled"),
    [
        ("processed", 0.6, SAMPLING, True),
        ("raw", 0.6, Sampling(), False),
        ("raw", 1, Sampling(top_p=0.9), False),
        ("raw", 1, Sampling(), True),
    ],
)
def test_raw_log_probabilities_are_those_of_plain_sampling_only(
    tmp_path: Path, kind: Any, temperature: float, sampling: Sampling, as_sampled: bool
) -> None:
    traces = write(tmp_path / "traces", sampled_trace())
    manifest = dataclasses.replace(
        traces.manifest, temperature=temperature, sampling=sampling, logprobs=LogprobSpec(kind=kind)
    )
    assert manifest.logprobs_as_sampled == as_sampled


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no sampling": (lambda m: m.pop("sampling"), "0.6 contradicts sampling: None"),
    "greedy": (lambda m: m.update(temperature=0), "temperature: 0 contradicts sampling"),
    "top_p": (lambda m: m["sampling"].update(top_p=1.5), r"top_p: expected a share in \(0, 1\]"),
    "num_top": (lambda m: m["logprobs"].update(num_top=51), "num_top: expected 0 to 50"),
    "no logprobs": (lambda m: m.pop("logprobs"), "logprobs: expected those of the sampled tokens"),
    "other width": (
        lambda m: m["logprobs"].update(num_top=2),
        r"top_logprobs: expected F32 \[6, 2",
    ),
    "recorder": (lambda m: m.update(recorded_by="\n"), "recorded_by: expected 1 to 200 printable"),
}


def test_a_manifest_that_lies_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "traces", sampled_trace()).folder
    text = (folder / "trace.json").read_text(encoding="utf-8")
    for change, message in LIES.values():
        manifest = json.loads(text)
        change(manifest)
        (folder / "trace.json").write_text(json.dumps(manifest), encoding="utf-8")
        with pytest.raises(TraceError, match=message):
            TraceFolder.open(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_logprob", 0.1, "token_logprob: expected logarithms of probabilities, at most 0"),
        ("token_logprob", float("nan"), "token_logprob: expected logarithms"),
        ("token_logprob", -float("inf"), "a token that was emitted has probability 0"),
        ("top_logprobs", 1.0, "top_logprobs: expected logarithms"),
        ("top_token_ids", 50, r"top_token_ids: expected ids in \[0, 50\)"),
    ],
)
def test_values_out_of_range(tmp_path: Path, name: str, value: float, message: str) -> None:
    folder = write(tmp_path / "traces", sampled_trace()).folder
    with pytest.raises(TraceError, match=message):
        list(rewrite(folder, f"a.{name}", put(0, value)))


def test_what_is_declared_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=r"expected shapes \[\(6,\), \(6, 3\), \(6, 3\)\], got \[None"
    ):
        write(tmp_path / "traces", make_trace("a"))
    with pytest.raises(TraceError, match=r"expected shapes \[\(6,\), None, None\], got"):
        write(tmp_path / "traces", sampled_trace(), LogprobSpec(kind="processed"))
    assert not (tmp_path / "traces").exists()
