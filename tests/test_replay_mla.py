"""Replay of MLA drafts, and of drafts with several layers, against the loop that really decodes.

The same proof as in test_replay.py, with the independent draft of reference_mla.py: its KV cache
holds latents and is cropped after each verification, while replay keeps keys and values and
evaluates all rows at once.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.scripts.cli import main
from draftquant.validate.counting.trace_replay import replay_drafts
from reference_draft import ReferenceDraft
from reference_mla import ReferenceMlaDraft
from replay_proof import RoundInput, assert_replay_is_the_engine, quantized_folder, unrounded
from tied_mla import save_mla_draft
from tied_pair import save_draft, tied
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")


@pytest.fixture(scope="module")
def folder() -> Path:
    return tied(float64=True)


@pytest.fixture
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)


@pytest.fixture
def traces(folder: Path) -> TraceFolder:
    return TraceFolder.open(folder / "traces")


def prove(
    draft: Path,
    model: LlamaForCausalLM,
    traces: TraceFolder,
    *,
    round_input: RoundInput = unrounded,
    num_draft_tokens: int = 3,
    reference: type[ReferenceDraft] = ReferenceMlaDraft,
) -> None:
    loaded = load_draft(draft, dtype=torch.float64)
    counts = assert_replay_is_the_engine(
        loaded, round_input, model, traces, num_draft_tokens=num_draft_tokens, reference=reference
    )
    assert min(counts.histogram) > 0, "every number of accepted tokens has to occur"
    (replay,) = replay_drafts([loaded], traces, num_draft_tokens=num_draft_tokens)
    assert replay.counts == counts


@pytest.mark.some(1)
@pytest.mark.parametrize(("family", "num_layers"), [("mla", 1), ("mla", 2), ("llama", 2)])
def test_replay_equals_the_engine(
    folder: Path,
    tmp_path: Path,
    model: LlamaForCausalLM,
    traces: TraceFolder,
    family: str,
    num_layers: int,
) -> None:
    save = {"llama": save_draft, "mla": save_mla_draft}[family]
    reference = {"llama": ReferenceDraft, "mla": ReferenceMlaDraft}[family]
    draft = save(tmp_path / "draft", folder / "target", num_hidden_layers=num_layers)
    prove(draft, model, traces, reference=reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rope_interleave": False, "num_draft_tokens": 5},
        {"rope_scaling": None, "norm_output": True},
    ],
    ids=str,
)
def test_replay_equals_the_engine_with_options(
    folder: Path,
    tmp_path: Path,
    model: LlamaForCausalLM,
    traces: TraceFolder,
    options: dict[str, Any],
) -> None:
    num_draft_tokens = options.pop("num_draft_tokens", 3)
    draft = save_mla_draft(tmp_path / "draft", folder / "target", **options)
    prove(draft, model, traces, num_draft_tokens=num_draft_tokens)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("recipe", "num_layers"),
    [
        ("mi325x-w4a8", 1),
        ("blackwell-fp8", 1),
        ("int4-channel", 2),
    ],
)
def test_a_quantized_folder_replays_as_the_engine_decodes(
    folder: Path,
    tmp_path: Path,
    model: LlamaForCausalLM,
    traces: TraceFolder,
    recipe: str,
    num_layers: int,
) -> None:
    source = save_mla_draft(tmp_path / "draft", folder / "target", num_hidden_layers=num_layers)
    round_input = quantized_folder(source, tmp_path / "out", recipe, traces, 3)
    assert len(load_draft(tmp_path / "out").quantized) == 7 * num_layers
    prove(tmp_path / "out", model, traces, round_input=round_input)


def test_the_command_line_replays_with_another_rope_base(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds for every draft named, and the output says so."""
    served = save_mla_draft(tmp_path / "served", folder / "target", rope_theta=50000.0)
    trained = save_mla_draft(tmp_path / "trained", folder / "target", rope_theta=100.0)
    replay = ["replay", str(served), str(trained), "--traces", str(folder / "traces")]
    assert main([*replay, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*replay, "--rope-theta", "100", "--json"]) == 0
    probed = json.loads(capsys.readouterr().out)
    assert [found["rope_theta"] for found in plain + probed] == [None, None, 100.0, 100.0]
    assert plain[0]["prompts"] != plain[1]["prompts"]
    assert probed[0]["prompts"] == probed[1]["prompts"] == plain[1]["prompts"]
    assert main([*replay, "--rope-theta", "100"]) == 0
    assert "the RoPE base is 100 instead of that of config.json" in capsys.readouterr().out
    assert main([*replay, "--rope-theta", "-1"]) == 2
    assert "rope_theta: expected a number above 1, got -1.0" in capsys.readouterr().err
