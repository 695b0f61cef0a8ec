"""One draft beside its target in two precisions: verdicts that speak of the target, bad input."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corpus
import draftquant.api as dq
import numpy as np
import pytest
import torch
from draftquant.calibration.traces.manifest import Sampling, manifest_text
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.recipes.errors import DraftQuantError
from draftquant.scripts.cli import main
from draftquant.validate.report.document import read_report
from draftquant.validate.runs import drafts_judged
from draftquant.validate.served.target_pair import BesideTarget, check_targets, judge_targets
from handmade_replays import RELEASE
from handmade_reports import KNOWN, ONE_BY_ONE, lost
from safetensors.torch import load_file, save_file

from benchmarks import targets

PAIR = corpus.PAIRS / "eagle3-llama"
DRAFT = PAIR / "draft"
FEW = ["--min-prompts", "2", "-q"]


def rounded_target(out: Path) -> Path:
    """The shipped target, whose linears are rounded to FP8 E4M3 with a scale for each row."""
    shutil.copytree(PAIR / "target", out)
    tensors = load_file(out / "model.safetensors")
    for name, weight in tensors.items():
        if weight.ndim == 2 and "layers." in name:
            scale = weight.float().abs().amax(dim=1, keepdim=True) / 448
            codes = (weight.float() / scale).to(torch.float8_e4m3fn)
            tensors[name] = (codes.float() * scale).to(weight.dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def first() -> Path:
    return corpus.traces("eagle3-llama")


def second(prompts: int = 12) -> Path:
    """The same prompts beside the rounded target."""

    def make(out: Path) -> None:
        lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(True)
        asked = out.with_name(f"{out.name}.jsonl")
        asked.write_text("".join(lines[:prompts]), encoding="utf-8")
        target = corpus.made("eagle3-llama-fp8-target", rounded_target)
        dq.record(target, asked, out, draft=DRAFT, max_new_tokens=48)

    return corpus.made(f"eagle3-llama-fp8-traces-{prompts}-48", make)


def sides() -> list[BesideTarget]:
    found = []
    for folder in (first(), second()):
        (replay,) = dq.replay([DRAFT], folder)
        found.append(BesideTarget(replay=replay, traces=TraceFolder.open(folder)))
    return found


def test_a_verdict_speaks_of_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["gate", str(DRAFT), "--traces", str(first()), "--traces-of-candidate", str(second())]
    code = main([*asked, *FEW, "--report", str(tmp_path / "g.json")])
    (_, report), said = read_report(tmp_path / "g.json").comparisons[0], capsys.readouterr().out
    assert code == report.exit_code
    assert "Replayed beside two targets, K = 3, 12 prompts" in said
    assert report.candidate.name == "draft beside eagle3-llama-fp8-target"
    assert report.served is not None
    assert report.traces is not None
    assert report.served.model.startswith("eagle3-llama-fp8-target (")
    assert 0 < (report.served.common_share or 0) < 1
    assert report.background.baseline_sha256 == report.background.candidate_sha256
    assert "QUANT" not in f"{report.reason}{report.action}"
    assert main(["compare", *[str(tmp_path / "g.json")] * 2]) == 2


def test_pages_name_the_targets_and_one_draft() -> None:
    asked = dq.gate(DRAFT, traces=first(), traces_of_candidate=second(), min_prompts=2)
    page, text, cases = asked.html(), asked.markdown(), asked.junit()
    assert asked.served is not None
    for told in (page, text):
        assert "QUANT" not in told
        assert not {"BF16", "uantized"} & set(told.replace("<", " ").replace("|", " ").split())
        assert "eside the second" in told
    names = asked.candidate.name, asked.baseline.name
    assert "Is <b>{}</b> accepted as often as <b>{}</b>?".format(*names) in page
    assert f"gate of `{names[0]}`" in text
    assert "under both drafts" not in page
    assert page.count("Acceptance length of every prompt beside both targets") == 1
    assert f'<th scope="row">Second target</th><td>{asked.served.model}' in page
    assert "both targets wrote" in page
    assert "What was quantized" not in page
    assert text.count("beside both targets `draft`") == 1
    assert asked.verdict in cases


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_split_steps_are_found(drop: float) -> None:
    """The same text in more steps: that is what a lower acceptance beside a target is."""
    paired = targets.both_ways([side.records for side in sides()], 3)
    generator = np.random.default_rng(0)
    whole = paired[0][1].candidate.whole
    split = targets.splitted(generator, whole, 0.5)
    assert split.num_emitted_tokens == whole.num_emitted_tokens
    assert split.num_steps > whole.num_steps
    found = [targets.simulated(generator, paired, 300, drop).verdict for _ in range(4)]
    assert ("FAIL" in found) == (drop > 0)


def test_a_fail_names_the_target_and_not_the_draft() -> None:
    one, other = sides()
    prompts = []
    for prompt in other.replay.prompts:
        steps = tuple(s for a in prompt.steps for s in ([0] * (a + 1)))
        halves = dataclasses.replace(prompt.counts, histogram=(len(steps), 0, 0, 0))
        prompts.append(dataclasses.replace(prompt, steps=steps, counts=halves))
    broken = dataclasses.replace(other.replay, prompts=tuple(prompts))
    report = judge_targets(one, dataclasses.replace(other, replay=broken), RELEASE)
    assert (report.verdict, report.exit_code) == ("ANOMALOUS", 3)


def test_what_was_known_before_reaches_the_report() -> None:
    one, other = sides()
    traces = dataclasses.replace(one.replay.traces, repeated_8gram_share=0.5)
    looping = dataclasses.replace(other, replay=dataclasses.replace(other.replay, traces=traces))
    for known in ONE_BY_ONE:
        assert lost(known, judge_targets(one, other, RELEASE, background=known)) == []
    assert lost(KNOWN, judge_targets(one, looping, RELEASE, background=KNOWN)) == []


@pytest.mark.parametrize("worse", [0, 1])
def test_what_is_known_of_either_side_is_said(worse: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides' own warnings and seen prompts, and the worse of two agreements."""
    folders = (first(), second())
    seen = [entry.id for entry in TraceFolder.open(first()).manifest.prompts][:2]

    def known(name: str, tell: Callable[[int], Any]) -> None:
        def told(*asked: Any) -> Any:
            (traces,) = (one for one in asked if isinstance(one, TraceFolder))
            return tell(folders.index(traces.folder))

        monkeypatch.setattr(drafts_judged, name, told)

    unknown = [SimpleNamespace(continuations=(seen[i],), unknown=(f"? {i}",)) for i in (0, 1)]
    known("check_held_out", unknown.__getitem__)
    known("origin_warnings", lambda side: (f"origin {side}",))
    known("head_agreement", lambda side: 0.5 if side == worse else 0.999)
    found = dq.gate(DRAFT, traces=folders[0], traces_of_candidate=folders[1]).background
    assert found.head_agreement == 0.5
    assert found.seen_continuations == (*seen,)
    for side in (0, 1):
        assert {f"? {side}", f"origin {side}"} <= {*found.warnings}


def test_text_that_repeats_itself_more_does_not_pass() -> None:
    one, other = sides()
    traces = dataclasses.replace(one.replay.traces, repeated_8gram_share=0.5)
    looping = dataclasses.replace(other.replay, traces=traces)
    report = judge_targets(one, dataclasses.replace(other, replay=looping), RELEASE)
    assert "50.0% in the second's" in report.background.not_compared[0]


OF_TWO_DRAFTS = """--unrelated, --unrecorded, --head-online fp8, --kv-cache-dtype fp8_e4m3,
    --target T, --measured A B, --baseline-again A, --parity P, --golden G, --profile P"""


@pytest.mark.parametrize("more", ["DRAFT", *OF_TWO_DRAFTS.split(",")])
def test_what_is_of_two_drafts_is_refused(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = more.replace("DRAFT", str(DRAFT)).split()
    assert main(["gate", str(DRAFT), *words, "--traces", "T", "--traces-of-candidate", "T2"]) == 2
    idle = f"{words[0]}: says nothing of one draft"
    assert ("expected one draft" if more == "DRAFT" else idle) in capsys.readouterr().err


def test_traces_that_say_nothing_of_two_targets(tmp_path: Path) -> None:
    with pytest.raises(DraftQuantError, match="recorded from the same target"):
        dq.gate(DRAFT, traces=first(), traces_of_candidate=first())
    with pytest.raises(DraftQuantError, match="expected DRAFT --traces T beside it"):
        dq.gate(DRAFT, traces_of_candidate=second())
    drawn = {"temperature": 0.7, "sampling": Sampling()}
    sampled = TraceFolder.open(second())
    sampled.manifest = dataclasses.replace(sampled.manifest, **drawn)
    with pytest.raises(DraftQuantError, match=r"was sampled at temperature 0\.7"):
        check_targets(TraceFolder.open(first()), sampled)
    one, other = sides()
    entries, features = other.traces.manifest.prompts, other.traces.manifest.features
    two_layers = dataclasses.replace(features, aux_layer_ids=(0, 1))
    later = tuple(dataclasses.replace(e, prompt_length=e.prompt_length - 1) for e in entries)
    for changes, said in (
        ({"prompts": later}, "hold the targets' own answers"),
        ({"ignore_eos": True}, "ignore_eos: False, True"),
        ({"features": two_layers}, "recorded layers: (0, 1, 2), (0, 1)"),
        ({"recorded_by": "vllm 0.33.0"}, "recorded by: 'transformers', 'vllm 0.33.0'"),
    ):
        out = shutil.copytree(second(), tmp_path / said[:11].strip())
        manifest = dataclasses.replace(TraceFolder.open(second()).manifest, **changes)
        (out / "trace.json").write_text(manifest_text(manifest), encoding="utf-8")
        traces = TraceFolder.open(out)
        (replay,) = dq.replay([DRAFT], second())
        report = judge_targets(one, BesideTarget(replay=replay, traces=traces), RELEASE)
        assert report.verdict == "ANOMALOUS"
        assert said in report.reason
    report = dq.gate(DRAFT, traces=first(), traces_of_candidate=second(prompts=8))
    assert report.verdict == "ANOMALOUS"
    assert "hold different prompts" in report.reason
