"""The held-out rule: prompts that calibrated a draft do not judge it, whatever they are called."""

import dataclasses
import json
from pathlib import Path

import pytest
from draftquant.calibration.traces.folder import TraceFolder
from draftquant.calibration.traces.prompt_trace import PromptTrace, prompt_sha256
from draftquant.calibration.traces.writer import trace_output
from draftquant.quantize.files.provenance import QuantizedProvenance, read_provenance
from draftquant.scripts.cli import main
from draftquant.validate.errors import GateError
from draftquant.validate.held_out import check_held_out
from test_provenance import document
from test_traces import AUX, TARGET, make_trace
from tiny import tiny_eagle3_llama

TRACES = [make_trace(f"p{i}", seed=i) for i in range(4)]
SEEN = TRACES[1].prompt_sha256


def folder_of(traces: list[PromptTrace], folder: Path) -> TraceFolder:
    with trace_output(folder, TARGET, AUX) as writer:
        for position, trace in enumerate(traces):
            writer.add(trace, position=position)
    return TraceFolder.open(folder)


def record(folder: Path, **changes: object) -> QuantizedProvenance:
    (folder / "draftquant.json").write_text(
        json.dumps(document("whole") | changes), encoding="utf-8"
    )
    found = read_provenance(folder)
    assert isinstance(found, QuantizedProvenance)
    return found


def test_a_prompt_is_known_by_its_tokens() -> None:
    assert prompt_sha256([1, 23]) != prompt_sha256([12, 3])
    assert prompt_sha256([1, 23]) == (
        "dec1a325b2aab707b526fa2b8a16aba9a9edba3ccb8de9df7b34f28fb85c1d0f"
    )


@pytest.mark.parametrize("name", ["p1", "renamed"])
def test_a_prompt_that_calibrated_is_refused(name: str, tmp_path: Path) -> None:
    """Recorded again or renamed, alone or among others, with a longer continuation or another."""
    again = dataclasses.replace(make_trace(name, new_tokens=9, seed=1))
    again.token_ids[: again.prompt_length] = TRACES[1].token_ids[:4]
    traces = folder_of([TRACES[0], again], tmp_path / "traces")
    candidate = record(tmp_path, calibration_prompts=[SEEN])
    with pytest.raises(GateError, match=f"1 of its 2 prompts calibrated the candidate: {name}"):
        check_held_out(candidate, traces)


def test_fresh_prompts_are_accepted(tmp_path: Path) -> None:
    traces = folder_of(TRACES[2:], tmp_path / "traces")
    assert check_held_out(record(tmp_path, calibration_prompts=[SEEN]), traces) == ()
    assert check_held_out(None, traces) == ()


def test_four_are_counted_and_three_named(tmp_path: Path) -> None:
    traces = folder_of(TRACES, tmp_path / "traces")
    prompts = sorted(trace.prompt_sha256 for trace in TRACES)
    with pytest.raises(GateError, match=r"4 of its 4 prompts calibrated .*: p0, p1, p2, \.\.\."):
        check_held_out(record(tmp_path, calibration_prompts=prompts), traces)


def test_a_record_without_prompts_says_so_or_names_the_traces(tmp_path: Path) -> None:
    """Folders of earlier versions."""
    traces = folder_of(TRACES, tmp_path / "traces")
    old = record(tmp_path, input_scale_origin=f"traces sha256 {traces.sha256}, num_draft_tokens 3")
    with pytest.raises(GateError, match="on these very traces"):
        check_held_out(old, traces)
    for origin in (None, f"traces sha256 {'0' * 64}, num_draft_tokens 3"):
        (warning,) = check_held_out(record(tmp_path, input_scale_origin=origin), traces)
        assert "does not say which prompts" in warning
    assert check_held_out(record(tmp_path, input_scale_origin="--input-scale"), traces) == ()


DAMAGED = {
    "verify": ["verify", "OUT", "--against", "DRAFT"],
    "inspect": ["inspect", "OUT"],
    "dequantize": ["dequantize", "OUT", "--out", "NEW"],
    "gate": ["gate", "DRAFT", "OUT", "--traces", "NEW"],
    "fix": ["check", "OUT", "--engine", "vllm", "--fix", "--out", "NEW"],
}


@pytest.mark.parametrize("command", DAMAGED)
def test_no_command_goes_on_with_a_damaged_record(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, out, new = tiny_eagle3_llama(tmp_path / "draft"), tmp_path / "out", tmp_path / "new"
    assert main(["quantize", str(draft), "--recipe", "fp8-ptpc", "--out", str(out)]) == 0
    (out / "draftquant.json").write_text('{"format": "draftquant-provenance"}', encoding="utf-8")
    capsys.readouterr()
    names = {"OUT": str(out), "DRAFT": str(draft), "NEW": str(new)}
    code = main([names.get(word, word) for word in DAMAGED[command]])
    said = " ".join("".join(capsys.readouterr()).split())  # lines are wrapped
    assert code == (1 if command == "verify" else 2)
    assert "version: missing key" in said
    assert not new.exists()
