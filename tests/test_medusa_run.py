"""Medusa heads fitted to a tiny target: recorded, quantized in every way, verified and replayed.

Replay is held against a loop that decodes with the target and the heads, without a cache.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import block_pair
import pytest
import tied_pair
import torch
from draftquant.calibration.linear_inputs.plan_inputs import measured_inputs
from draftquant.calibration.passes.memory import estimate_replay
from draftquant.calibration.passes.predictions import (
    draft_predictions,
    num_draft_tokens_fault,
)
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.record_traces import record_traces
from draftquant.calibration.rounding import learning_settings as settings_module
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.errors import ForwardError
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.quantization_plan import make_plan
from draftquant.quantize.quantize_draft import quantize_draft
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import Recipe, load_recipe
from draftquant.scripts.cli import main
from draftquant.validate.counting.trace_replay import chosen_num_draft_tokens, replay_drafts
from reference_draft import transformers_in_float64
from safetensors.torch import load_file, save_file
from test_learn_command import FEW
from tiny_medusa import tiny_medusa
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, LAST, MAX_NEW = 3, block_pair.NUM_LAYERS - 1, 20
VOCAB, HIDDEN = block_pair.VOCAB, block_pair.HIDDEN


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, heads whose lm_heads a ridge regression fits to its text, and traces of it."""
    folder = tmp_path_factory.mktemp("medusa")
    draft, target = folder / "draft", block_pair.save_target(folder / "target")
    tiny_medusa(draft, num_heads=HEADS, biases=True, hidden=HIDDEN, vocab=VOCAB)
    ids = tied_pair.prompt_tokens(12, 6)
    prompts = [
        Prompt(id=f"p{i}", category="a", token_ids=tuple(1 + t % (VOCAB - 1) for t in row))
        for i, row in enumerate(ids)
    ]
    with transformers_in_float64():
        traces = record_traces(
            target,
            prompts,
            folder / "traces",
            max_new_tokens=MAX_NEW,
            fuse_with=load_draft(draft, dtype=torch.float64),
            dtype="float64",
        )
    tensors = load_file(draft / "model.safetensors")
    for depth in range(HEADS):
        wanted, states = [], []
        for trace in traces:
            x = _block(trace.features, tensors, depth)[: -1 - depth]
            wanted.append(functional.one_hot(trace.token_ids[2 + depth :], VOCAB).double())
            states.append(x[: len(wanted[-1])])
        x, y = torch.cat(states), torch.cat(wanted)
        fit = torch.linalg.solve(x.T @ x + 1e-2 * torch.eye(HIDDEN, dtype=x.dtype), x.T @ y)
        tensors[f"lm_heads.{depth}.weight"] = (4 * fit.T).bfloat16().contiguous()
    save_file(tensors, draft / "model.safetensors")
    return folder


def _block(states: Tensor, tensors: dict[str, Tensor], depth: int) -> Tensor:
    """x + silu(W x + b), written out."""
    weight, bias = (tensors[f"blocks.{depth}.layers.0.{part}"] for part in ("weight", "bias"))
    inner = states.double() @ weight.double().T + bias.double()
    return states.double() + inner / (1 + torch.exp(-inner))


@pytest.fixture(scope="module")
def traces(pair: Path) -> TraceFolder:
    return TraceFolder.open(pair / "traces")


@torch.no_grad()
def decoded(
    model: PreTrainedModel, tensors: dict[str, Tensor], prompt: Sequence[int], length: int
) -> tuple[list[int], list[int]]:
    """Tokens, and the accepted ones of each round: the whole text is read anew in every round."""

    def read(ids: Sequence[int]) -> tuple[Tensor, list[int]]:
        states = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return states, model.lm_head(states).argmax(-1).tolist()

    states, best = read(prompt)
    committed, rounds = [*prompt, best[-1]], []
    while len(committed) < length:
        state = states[len(committed) - 2]  # which the last committed token came from
        drafted = [
            int((tensors[f"lm_heads.{i}.weight"].double() @ _block(state, tensors, i)).argmax())
            for i in range(HEADS)
        ]
        states, best = read([*committed, *drafted])
        said, accepted = best[len(committed) - 1 :], 0
        while accepted < HEADS and drafted[accepted] == said[accepted]:
            accepted += 1
        committed += [*drafted[:accepted], said[accepted]]
        rounds.append(accepted)
    return committed, rounds


def test_replay_counts_the_rounds_of_a_loop_that_decodes(pair: Path, traces: TraceFolder) -> None:
    draft = load_draft(pair / "draft", dtype=torch.float64)
    assert chosen_num_draft_tokens(None, [draft]) == HEADS
    (found,) = replay_drafts([draft], traces, num_draft_tokens=HEADS)
    assert found.counts.mean_acceptance_length > 1.3
    tensors = load_file(pair / "draft" / "model.safetensors")
    with transformers_in_float64():
        model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float64)
        for trace, counted in zip(traces, found.prompts, strict=True):
            ids = trace.token_ids.tolist()
            tokens, rounds = decoded(model, tensors, ids[: trace.prompt_length], len(ids))
            assert tokens[: len(ids)] == ids
            whole, last = [], trace.prompt_length  # rounds whose drafted tokens are all recorded
            for accepted in rounds:
                if last + HEADS < len(ids):
                    whole.append(accepted)
                last += accepted + 1
            assert counted.counts.histogram == tuple(whole.count(j) for j in range(HEADS + 1))


def test_fewer_tokens_than_heads(pair: Path, traces: TraceFolder) -> None:
    draft = load_draft(pair / "draft", dtype=torch.float64)
    trace = traces.load(traces.manifest.prompts[0])
    asked = {
        k: draft_predictions(
            draft.forward, trace.features, trace.token_ids, first_row=5, num_draft_tokens=k
        )
        for k in (2, HEADS)
    }
    assert torch.equal(asked[2][:-1], asked[HEADS][:, :2])
    fault = num_draft_tokens_fault(draft.geometry, HEADS + 1)
    assert fault is not None
    assert fault[0] == "expected at most 3, got 4: the draft has 3 heads, a token each"


def test_parts_of_the_rows_change_nothing(pair: Path, traces: TraceFolder) -> None:
    draft = load_draft(pair / "draft", dtype=torch.float64)
    trace = traces.load(traces.manifest.prompts[0])
    one, other = (
        draft_predictions(
            draft.forward,
            trace.features,
            trace.token_ids,
            first_row=5,
            num_draft_tokens=HEADS,
            block_rows=rows,
        )
        for rows in (256, 3)
    )
    assert torch.equal(one, other)


def test_some_of_the_rows_are_those_of_all(pair: Path, traces: TraceFolder) -> None:
    """Every third, as learning asks for them: each one's own state."""
    draft = load_draft(pair / "draft", dtype=torch.float64)
    trace = traces.load(traces.manifest.prompts[0])
    hidden, ids = draft.forward.fuse(trace.features)[None], trace.token_ids[None]
    every = list(draft.forward.passes(hidden, ids, rows=range(2, 14), num_draft_tokens=HEADS))
    third = list(draft.forward.passes(hidden, ids, rows=range(2, 14, 3), num_draft_tokens=HEADS))
    assert [one.depths for one in third] == [one.depths for one in every]
    for some, whole in zip(third, every, strict=True):
        assert torch.equal(some.hidden, whole.hidden[:, ::3])


def test_a_state_that_is_no_number_is_refused(pair: Path, traces: TraceFolder) -> None:
    draft = load_draft(pair / "draft", dtype=torch.float64)
    draft.weights["blocks.1.layers.0.bias"][0] = torch.nan
    with pytest.raises(ForwardError, match="draft head 2"):
        replay_drafts([draft], traces, num_draft_tokens=HEADS)


def test_memory_is_bounded_from_headers(pair: Path, traces: TraceFolder) -> None:
    estimate = estimate_replay(
        [pair / "draft"],
        traces,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_draft_tokens=None,
        batch_size=None,
    )
    assert estimate.tables == 0
    assert estimate.fits


def run(command: str, *arguments: object) -> None:
    assert main([command, *map(str, arguments)]) == 0


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("recipe", "algorithm"),
    [
        ("int4-channel", "absmax"),
        ("int4-channel", "gptq"),
        ("int4-channel", "learned"),
        ("blackwell-nvfp4", "absmax"),
        ("mi355-mxfp4", "absmax"),
        ("mi325x-fp8", "absmax"),
    ],
)
def test_codes_are_found_verified_and_replayed(
    recipe: str,
    algorithm: str,
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(settings_module, "LearningSettings", lambda: FEW)
    out, floats, draft = tmp_path / "out", tmp_path / "floats", pair / "draft"
    traces = ("--traces", pair / "traces")
    inputs = traces if algorithm != "absmax" or recipe == "blackwell-nvfp4" else ()
    run("quantize", draft, "--recipe", recipe, "--algorithm", algorithm, "--out", out, *inputs)
    assert verify(out, draft).ok
    run("dequantize", out, "--out", floats)
    capsys.readouterr()
    run("replay", draft, out, floats, *traces, "--json")
    said: Any = json.loads(capsys.readouterr().out)
    lengths = [one["mean_acceptance_length"] for one in said]
    assert all(length > 1.2 for length in lengths)
    assert abs(lengths[1] - lengths[2]) < 0.1  # BF16 rounds the dequantized weights once more


def _with_heads(recipe: Recipe, **changes: Any) -> Recipe:
    rules = tuple(
        dataclasses.replace(rule, action="quantize", why=None, **changes)
        if rule.role == ("head",)
        else rule
        for rule in recipe.rules
    )
    return dataclasses.replace(recipe, rules=rules)


@pytest.mark.parametrize("own", [False, True], ids=["the recipe's format", "one of their own"])
def test_quantized_heads_are_declared_by_name(own: bool, pair: Path, tmp_path: Path) -> None:
    """The last part of `lm_heads.0` and of `blocks.0.layers.0` alike is a number."""
    (form,) = load_recipe("fp8-ptpc").formats
    recipe = _with_heads(load_recipe("int4-channel"), **({"format": form} if own else {}))
    plan = make_plan(recipe, read_draft(Checkpoint.open(pair / "draft")))
    quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=pair / "draft"))
    assert verify(tmp_path / "out", pair / "draft").ok
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    groups = config["quantization_config"]["config_groups"]
    assert groups["group_1"]["targets"] == [f"re:.*lm_heads.{i}$" for i in range(HEADS)]
    loaded = load_draft(tmp_path / "out")
    assert {name.partition(".")[0] for name in loaded.quantized} == {"blocks", "lm_heads"}


def test_gptq_sees_what_a_head_reads(pair: Path, tmp_path: Path) -> None:
    recipe = _with_heads(load_recipe("int4-channel-gptq"))
    plan = make_plan(recipe, read_draft(Checkpoint.open(pair / "draft")))
    inputs = measured_inputs(
        plan,
        load_draft(pair / "draft", dtype=torch.float32),
        TraceFolder.open(pair / "traces"),
        num_draft_tokens=HEADS,
        spool=tmp_path,
    )
    assert inputs.statistics is not None
    names = [step.row.canonical.removesuffix(".weight") for step in plan.quantized]
    inputs.statistics.measure(names)
    moments = inputs.statistics.second_moments(names)
    assert set(moments) == set(names)
    first = [f"blocks.{i}.layers.0" for i in range(HEADS)]
    assert not torch.equal(moments["lm_heads.0"].mean, moments[first[0]].mean)
