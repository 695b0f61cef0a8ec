"""Replay of quantized folders, written by `quantize`, read by `load_draft`, against the loop."""

import dataclasses
from pathlib import Path

import pytest
import torch
from draftquant.calibration.linear_inputs.static_scales import measure_absmax, stored_scale
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import Measured, make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes import load_recipe
from recorded import record_traces
from reference_draft import transformers_in_float64
from replay_proof import (
    RoundInput,
    assert_replay_is_the_engine,
    fp8_per_token,
    fp8_rounded,
    unrounded,
)
from torch import Tensor
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    out = tmp_path_factory.mktemp("folders") / "traces"
    prompts = read_prompts(PAIR / "prompts.jsonl")[4:8]
    with transformers_in_float64():
        return record_traces(
            PAIR / "target",
            prompts,
            out,
            max_new_tokens=96,
            aux_layer_ids=(0, 1, 2),
            dtype="float64",
        )


@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["mi325x-w4a8", "int4-channel", "fp8-ptpc", "blackwell-fp8"])
def test_a_quantized_folder_replays_as_the_engine_decodes(
    tmp_path: Path, traces: TraceFolder, recipe: str
) -> None:
    chosen = dataclasses.replace(load_recipe(recipe), backend="torch")
    plan = make_plan(chosen, read_draft(Checkpoint.open(PAIR / "draft")))
    scales: dict[str, float] = {}
    if chosen.needs_input_scales:
        measured = measure_absmax(DraftRun(load_draft(PAIR / "draft"), traces, 3))
        scales = {n: stored_scale(x, chosen.activations) for n, x in measured.items()}
    stored = {name.replace("layers.0.", "midlayer."): scale for name, scale in scales.items()}
    quantize_draft(
        plan,
        tmp_path / "out",
        source=DraftSource(folder=PAIR / "draft"),
        measured=Measured(input_scales=stored),
    )

    def statically(name: str, x: Tensor) -> Tensor:
        return fp8_rounded(x, torch.tensor(scales[name]))

    round_input: RoundInput = {
        "mi325x-w4a8": fp8_per_token,
        "int4-channel": unrounded,
        "fp8-ptpc": fp8_per_token,
        "blackwell-fp8": statically,
    }[recipe]
    draft = load_draft(tmp_path / "out", dtype=torch.float64)
    assert len(draft.quantized) == 7
    model = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float64)
    counts = assert_replay_is_the_engine(draft, round_input, model, traces, num_draft_tokens=3)
    assert min(counts.histogram) > 0
