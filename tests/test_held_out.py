"""The held-out rule: prompts that calibrated a draft do not judge it, whatever they are called."""

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import corpus
import pytest
import torch
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.traces.held_out import (
    HeldOut,
    check_held_out,
    seen_continuations,
    seen_prompts,
)
from draftquant.calibration.traces.prompt_trace import PromptTrace, prompt_sha256
from draftquant.calibration.traces.related_prompts import prompt_text, related_groups
from draftquant.calibration.traces.sets import merge_traces, split_traces
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.traces.writer import trace_output
from draftquant.quantize.files.provenance import QuantizedProvenance
from draftquant.quantize.files.provenance_file import read_provenance
from draftquant.recipes.decode import encode
from draftquant.recipes.errors import GateError
from test_provenance import document
from test_traces import AUX, TARGET, make_trace

TRACES = [make_trace(f"p{i}", seed=i) for i in range(4)]
SEEN = TRACES[1].prompt_sha256


def folder_of(traces: list[PromptTrace], folder: Path) -> TraceFolder:
    with trace_output(folder, GREEDY.manifest(TARGET, AUX)) as writer:
        for position, trace in enumerate(traces):
            writer.add(trace, position=position)
    return TraceFolder.open(folder)


def record(folder: Path, **changes: object) -> QuantizedProvenance:
    text = json.dumps(document("whole") | changes)
    (folder / "draftquant.json").write_text(text, encoding="utf-8")
    found = read_provenance(folder)
    assert isinstance(found, QuantizedProvenance)
    return found


def calibrated_on(traces: TraceFolder, folder: Path) -> QuantizedProvenance:
    """The record of a draft that these traces calibrated."""
    seen = seen_prompts(traces)
    sketches = encode(seen.sketches)
    return record(folder, calibration_prompts=list(seen.sha256), calibration_sketches=sketches)


def test_a_quantized_draft_records_what_calibrated_it() -> None:
    kind = "eagle3-llama"
    made = read_provenance(corpus.quantized(kind, "blackwell-fp8", pair=True, measured=True))
    seen = seen_prompts(TraceFolder.open(corpus.traces(kind)))
    assert isinstance(made, QuantizedProvenance)
    assert (made.calibration_prompts, made.calibration_sketches) == (seen.sha256, seen.sketches)
    assert made.calibration_target == seen.target


def with_prompt(trace: PromptTrace, token_ids: Sequence[int], **changes: object) -> PromptTrace:
    """The trace with another prompt in front of the same continuation."""
    longer = len(token_ids) - trace.prompt_length
    added, cut = max(0, longer), max(0, -longer)
    tokens = torch.tensor(token_ids), trace.token_ids[trace.prompt_length :]
    features = trace.features.new_zeros(added, trace.features.shape[1]), trace.features[cut:]
    top1 = torch.full((added,), -1), trace.target_top1[cut:]
    of = {"token_ids": tokens, "features": features, "target_top1": top1}
    joined: dict[str, Any] = {name: torch.cat(parts) for name, parts in of.items()}
    return dataclasses.replace(trace, prompt_length=len(token_ids), **joined, **changes)


def answering(trace: PromptTrace, token_ids: Sequence[int]) -> PromptTrace:
    """The trace with these tokens where its continuation begins."""
    first, length = trace.prompt_length, len(token_ids)
    trace.token_ids[first : first + length] = torch.tensor(token_ids)
    trace.target_top1[first - 1 : first - 1 + length] = torch.tensor(token_ids)
    return trace


def reciting(seed: int) -> list[PromptTrace]:
    """Of a drawn target, which recites parts of few texts; some prompts are changed copies."""
    draw = random.Random(seed)
    texts = [[draw.randrange(50) for _ in range(160)] for _ in range(draw.randint(2, 6))]
    share, system = draw.choice([0.2, 0.5, 0.8]), draw.random()
    found: list[PromptTrace] = []
    for number in range(40):
        length = draw.choice([31, 48, 80, 96])
        own = make_trace(f"p{number}", draw.randint(20, 60), length, seed=1000 * seed + number)
        if draw.random() < system:
            own.token_ids[:16] = torch.tensor(texts[0][:16])
        if found and draw.random() < 0.1:
            old = draw.choice(found).token_ids[:19]
            own.token_ids[: len(old)] = old
        if draw.random() < share:
            text, first = draw.choice(texts), draw.choice([0, 0, 8, 40])
            answering(own, [*texts[1][: draw.choice([0, 0, 20])], *text[first:]][:length])
        found.append(own)
    return found


def prompt_of(trace: PromptTrace) -> list[int]:
    return trace.token_ids[: trace.prompt_length].tolist()


CHANGES: dict[str, Callable[[list[int]], list[int]]] = {
    "first": lambda ids: [(ids[0] + 1) % 50, *ids[1:]],
    "middle": lambda ids: [*ids[:24], (ids[24] + 1) % 50, *ids[25:]],
    "next-to-last": lambda ids: [*ids[:-2], (ids[-2] + 1) % 50, ids[-1]],
    "longer": lambda ids: [*ids, 7],
    "shorter": lambda ids: ids[1:],
}


@pytest.mark.parametrize(
    ("change", "length"),
    [("middle", 48), ("longer", 48), ("first", 400), ("next-to-last", 400), ("shorter", 400)],
)
def test_a_prompt_changed_a_little_is_refused(change: str, length: int, tmp_path: Path) -> None:
    """Alone and in nine versions: of short prompts all shingles are kept, of long ones 64."""
    calibration = [make_trace(f"p{i}", length, seed=i) for i in range(6)]
    candidate = calibrated_on(folder_of(calibration, tmp_path / "calibration"), tmp_path)
    near = with_prompt(calibration[2], CHANGES[change](prompt_of(calibration[2])), id="near")
    traces = folder_of([make_trace("other", length, seed=99), near], tmp_path / "one")
    with pytest.raises(GateError):
        check_held_out(candidate, traces)
    versions = [
        with_prompt(trace, [number, *prompt_of(trace)[1:]], id=f"{trace.id}-{number}")
        for trace, number in product(calibration[:4], range(9))
    ]
    with pytest.raises(GateError):
        check_held_out(candidate, folder_of(versions, tmp_path / "nine"))


@pytest.mark.parametrize(
    ("new_tokens", "loop", "known"), [(31, 31, 1), (128, 50, 1), (30, 30, 0), (128, 15, 0)]
)
def test_a_continuation_that_calibrated_is_known(
    new_tokens: int, loop: int, known: int, tmp_path: Path
) -> None:
    """A third of the prompt's text changed. Short texts and loops may be those of any prompt."""
    seen = make_trace("seen", 48, new_tokens, seed=1)
    seen.token_ids[48:] = seen.target_top1[47:] = torch.arange(new_tokens) % loop
    candidate = calibrated_on(folder_of([seen], tmp_path / "calibration"), tmp_path)
    ids = prompt_of(seen)
    ids[::12] = [(token + 1) % 50 for token in ids[::12]]
    traces = folder_of([with_prompt(seen, ids, id="near")], tmp_path / "traces")
    with pytest.raises(GateError) if known else nullcontext():
        assert check_held_out(candidate, traces) == HeldOut()


@pytest.mark.parametrize("name", ["random", "of another first turn"])
def test_another_conversation_hides_no_prompt(name: str, tmp_path: Path) -> None:
    """A hash that no first turn has is refused; under one that is there, the own hash is known."""
    candidate = calibrated_on(folder_of(TRACES[:2], tmp_path / "calibration"), tmp_path)
    claimed = "5" * 64 if name == "random" else TRACES[3].prompt_sha256
    hidden = dataclasses.replace(TRACES[1], conversation_sha256=claimed)
    traces = folder_of([TRACES[3], hidden], tmp_path / "traces")
    with pytest.raises(GateError):
        check_held_out(candidate, traces)


def test_a_conversation_that_was_one_prompt_is_known_turn_by_turn(tmp_path: Path) -> None:
    """Calibrated on the whole as one prompt; its first turn alone was never seen."""
    whole = make_trace("whole", 30, seed=5)
    candidate = calibrated_on(folder_of([whole], tmp_path / "calibration"), tmp_path)
    # The first turn need not be in the folder.
    known = dataclasses.replace(whole, conversation_sha256=prompt_sha256(prompt_of(whole)[:12]))
    assert check_held_out(None, folder_of([known], tmp_path / "begun")) == HeldOut()
    first = make_trace("first", 12, seed=6)
    later = dataclasses.replace(whole, id="later", conversation_sha256=first.prompt_sha256)
    with pytest.raises(GateError):
        check_held_out(candidate, folder_of([first, later], tmp_path / "traces"))
    candidate = calibrated_on(folder_of([later], tmp_path / "later"), tmp_path)
    with pytest.raises(GateError):
        check_held_out(candidate, folder_of([first], tmp_path / "first"))


def test_a_prompt_that_calibrated_is_refused(tmp_path: Path) -> None:
    """Recorded again or renamed, alone or among others, with a longer continuation or another."""
    again = dataclasses.replace(make_trace("renamed", new_tokens=9, seed=1))
    again.token_ids[: again.prompt_length] = TRACES[1].token_ids[:4]
    traces = folder_of([TRACES[0], again], tmp_path / "traces")
    candidate = record(tmp_path, calibration_prompts=[SEEN])
    with pytest.raises(GateError):
        check_held_out(candidate, traces)


def test_a_record_without_sketches_or_prompts_says_so(tmp_path: Path) -> None:
    fresh = folder_of(TRACES[2:], tmp_path / "fresh")
    check_held_out(record(tmp_path, calibration_prompts=[SEEN]), fresh)
    later = dataclasses.replace(make_trace("later", 30, seed=5), conversation_sha256=SEEN)
    begun = dataclasses.replace(TRACES[1], conversation_sha256=None)
    both = folder_of([begun, later], tmp_path / "later")
    with pytest.raises(GateError):
        check_held_out(record(tmp_path, calibration_prompts=[SEEN]), both)
    traces = folder_of(TRACES, tmp_path / "traces")
    for origin in (None, f"traces sha256 {'0' * 64}, num_draft_tokens 3"):
        check_held_out(record(tmp_path, input_scale_origin=origin), traces)
    assert check_held_out(record(tmp_path, input_scale_origin="--input-scale"), traces) == HeldOut()


@pytest.mark.parametrize(("seed", "count"), [(1, 30), (8, 30), (18, 30), (23, 20), (45, 20)])
def test_what_a_split_separates_no_gate_calls_seen(seed: int, count: int, tmp_path: Path) -> None:
    """In both directions, also where a side has templates of its own, as in these draws."""
    outs = tmp_path / "first", tmp_path / "second"
    traces = reciting(seed)
    report = split_traces(folder_of(traces, tmp_path / "all"), *outs, count=count, seed=seed)
    assert report.num_groups < len(related_groups([prompt_text(one) for one in traces])) < 40
    for one, other in (outs, outs[::-1]):
        made = [(seen_prompts(TraceFolder.open(one)), "made it")]
        assert seen_continuations(TraceFolder.open(other), made) == ()


def test_the_remedy_of_what_was_seen_works(tmp_path: Path) -> None:
    """Every id is in the error, ten in its text; merged and split as it says, nothing is seen."""
    traces = [make_trace(f"p{i}", 30, 64, seed=i) for i in range(24)]
    used, judged = traces[:12], traces[12:]
    for known, other in zip(used, judged, strict=True):
        answering(other, known.token_ids[30:].tolist())
    folders = folder_of(used, tmp_path / "used"), folder_of(judged, tmp_path / "judged")
    with pytest.raises(GateError) as caught:
        check_held_out(calibrated_on(folders[0], tmp_path), folders[1])
    assert caught.value.ids == tuple(f"p{i}" for i in range(12, 24))
    everything = merge_traces(folders, tmp_path / "all").traces
    split = split_traces(everything, tmp_path / "used2", tmp_path / "these2", count=7)
    assert check_held_out(calibrated_on(split.first, tmp_path), split.second) == HeldOut()


@pytest.mark.parametrize(("halves", "seen"), [(1, ("near",)), (2, ())])
def test_few_seen_continuations_are_named_and_a_union_of_two_is_none(
    halves: int, seen: tuple[str, ...], tmp_path: Path
) -> None:
    """One prompt in five is judged both ways; what only two texts hold together was not seen."""
    known = [make_trace(f"c{i}", 30, 64, seed=50 + i) for i in range(2)]
    calibration = tmp_path / "calibration"
    candidate = calibrated_on(folder_of(known, calibration), tmp_path)
    text = [t for one in known[:halves] for t in one.token_ids[30 : 30 + 64 // halves].tolist()]
    others = [make_trace(f"o{i}", 30, 64, seed=90 + i) for i in range(4)]
    near = answering(make_trace("near", 30, 64, seed=80), text)
    traces = folder_of([*others, near], tmp_path / "five")
    assert check_held_out(candidate, traces) == HeldOut(continuations=seen)
    strangers = folder_of([make_trace("s", 30, 64, seed=40)], tmp_path / "strangers")
    made = [(seen_prompts(one), "made it") for one in (TraceFolder.open(calibration), strangers)]
    for makers in (made, made[::-1]):  # the rows of a head were chosen by other prompts
        assert seen_continuations(traces, makers) == seen
