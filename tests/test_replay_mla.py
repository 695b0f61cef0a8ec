"""Replay of MLA drafts, and of drafts with several layers, against the loop that really decodes.

The same proof as in test_replay.py, with the independent draft of reference_mla.py: its KV cache
holds latents and is cropped after each verification, while replay keeps keys and values and
evaluates all rows at once.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.linear_inputs.static_scales import measure_absmax, stored_scale
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import Measured, make_plan
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from draftquant.validate.counting.trace_replay import replay_drafts
from recorded import record_traces
from reference_draft import ReferenceDraft, transformers_in_float64
from reference_mla import ReferenceMlaDraft
from replay_proof import (
    RoundInput,
    assert_replay_is_the_engine,
    fp8_per_token,
    fp8_rounded,
    unrounded,
)
from safetensors.torch import load_file, save_file
from tied_mla import save_mla_draft
from tied_pair import VOCAB, prompt_tokens, save_draft, save_target
from torch import Tensor
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("float64_on_one_thread")

ROUNDING: dict[str, RoundInput] = {
    "mi325x-w4a8": fp8_per_token,
    "int4-channel": unrounded,
    "fp8-ptpc": fp8_per_token,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mla")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    save_target(folder / "target")
    prompts = [
        Prompt(id=f"p{i}", category="ab"[i % 2], token_ids=tokens)
        for i, tokens in enumerate([*prompt_tokens(3, 12), *prompt_tokens(1, 1)])
    ]
    with transformers_in_float64():
        record_traces(
            folder / "target", prompts, folder / "traces", max_new_tokens=48, dtype="float64"
        )
    torch.set_num_threads(threads)
    return folder


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


@pytest.mark.some(1)
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
def test_replay_equals_the_engine_with_a_pruned_vocabulary(
    folder: Path, tmp_path: Path, model: LlamaForCausalLM, traces: TraceFolder
) -> None:
    draft = save_mla_draft(tmp_path / "draft", folder / "target", draft_vocab_size=80)
    tensors = load_file(draft / "model.safetensors")
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:80].sort().values
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept].contiguous()
    tensors["d2t"] = kept - torch.arange(80)
    save_file(tensors, draft / "model.safetensors")
    prove(draft, model, traces)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("recipe", "num_layers"),
    [
        ("mi325x-w4a8", 1),
        ("int4-channel", 1),
        ("int4-channel", 2),
        ("fp8-ptpc", 1),
        ("fp8-ptpc", 2),
        ("blackwell-fp8", 1),
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
    chosen = dataclasses.replace(load_recipe(recipe), backend="torch")
    scales: dict[str, float] = {}
    if chosen.needs_input_scales:
        measured = measure_absmax(DraftRun(load_draft(source), traces, 3))
        scales = {n: stored_scale(x, chosen.activations) for n, x in measured.items()}
    quantize_draft(
        make_plan(chosen, read_draft(Checkpoint.open(source))),
        tmp_path / "out",
        source=DraftSource(folder=source),
        measured=Measured(
            input_scales={name.replace("layers.0.", "midlayer."): s for name, s in scales.items()}
        ),
    )

    def statically(name: str, x: Tensor) -> Tensor:
        return fp8_rounded(x, torch.tensor(scales[name]))

    assert len(load_draft(tmp_path / "out").quantized) == 7 * num_layers
    prove(tmp_path / "out", model, traces, round_input=ROUNDING.get(recipe, statically))


def test_static_scales_of_an_mla_draft(folder: Path, tmp_path: Path, traces: TraceFolder) -> None:
    """One per linear that may be quantized; q_a and kv_a read one tensor and share theirs."""
    draft = load_draft(save_mla_draft(tmp_path / "draft", folder / "target"))
    scales = measure_absmax(DraftRun(draft, traces, 3))
    assert sorted(scales) == sorted(draft.linears)
    assert "layers.0.self_attn.kv_b_proj" not in scales
    assert scales["layers.0.self_attn.q_a_proj"] == scales["layers.0.self_attn.kv_a_proj_with_mqa"]
    assert len(set(scales.values())) == 5


def test_an_export_of_modelopt_takes_the_embedding_of_its_target(
    folder: Path, tmp_path: Path, traces: TraceFolder
) -> None:
    whole = save_mla_draft(tmp_path / "whole", folder / "target")
    tensors = load_file(whole / "model.safetensors")
    shared = {"embed_tokens.weight": tensors["embed_tokens.weight"]}
    bare = save_mla_draft(tmp_path / "bare", folder / "target", draft_vocab_size=None)
    exported = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if name not in shared
    }
    save_file(exported, bare / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not store embed_tokens\.weight"):
        load_draft(bare)
    drafts = [load_draft(whole), load_draft(bare, shared=shared)]
    first, second = replay_drafts(drafts, traces, num_draft_tokens=3)
    assert first.prompts == second.prompts


def test_another_rope_base_is_another_draft(
    folder: Path, tmp_path: Path, traces: TraceFolder
) -> None:
    """`rope_theta` replays with the base that a trainer may have used instead of the config's."""
    served = save_mla_draft(tmp_path / "served", folder / "target", rope_theta=50000.0)
    trained = save_mla_draft(tmp_path / "trained", folder / "target", rope_theta=100.0)
    drafts = [load_draft(served), load_draft(trained), load_draft(served, rope_theta=100.0)]
    assert [draft.geometry.rope.theta for draft in drafts] == [50000.0, 100.0, 100.0]
    as_served, as_trained, probed = replay_drafts(drafts, traces, num_draft_tokens=3)
    assert probed.prompts == as_trained.prompts != as_served.prompts
    assert drafts[0].geometry == dataclasses.replace(
        drafts[2].geometry, rope=drafts[0].geometry.rope
    )
    for wrong in (0.0, -1.0, 1.0, float("inf"), float("nan")):
        with pytest.raises(CheckpointError, match="rope_theta: expected a number above 1"):
            load_draft(served, rope_theta=wrong)


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
