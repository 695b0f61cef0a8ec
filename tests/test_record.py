"""Recording from a transformers target: features, greedy tokens, ends, determinism, refusals."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.passes.draft_inputs import check_trace_fits, default_aux_layer_ids
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.decoding import Decoding
from draftquant.calibration.traces.sets import merge_traces
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import TraceError
from draftquant.validate.counting.trace_replay import replay_drafts
from recorded import record_traces
from safetensors.torch import load_file, save_file
from tied_pair import AUX_LAYER_IDS, HIDDEN, VOCAB, prompt_tokens, save_draft, save_target
from tiny import edit_json, read_tensors, write_tensors
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [
    Prompt(id=f"p{i}", category="abc"[i % 3], token_ids=tokens)
    for i, tokens in enumerate(
        [*prompt_tokens(3, 9), *prompt_tokens(2, 5, seed=1), *prompt_tokens(2, 1)]
    )
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("record") / "target")


@pytest.fixture(scope="module")
def model(target: Path) -> LlamaForCausalLM:
    loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(target, dtype=torch.float64)
    return loaded


@pytest.fixture(scope="module")
def traces(target: Path, tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    out = tmp_path_factory.mktemp("record") / "out"
    given: dict[str, Any] = {"dtype": "float64", "batch_size": 2}
    return record_traces(target, PROMPTS, out, max_new_tokens=12, **given)


@torch.no_grad()
def test_features_and_tokens_are_those_of_one_full_forward(
    traces: TraceFolder, model: LlamaForCausalLM
) -> None:
    """Recorded a token at a time in batches; checked against one pass over the whole sequence.

    transformers rounds norms and softmax to float32 inside a float64 model, and the order of sums
    differs between the two: 1e-5 on features of order 10.
    """
    assert [trace.id for trace in traces] == [prompt.id for prompt in PROMPTS]
    for trace, prompt in zip(traces, PROMPTS, strict=True):
        assert trace.token_ids[: trace.prompt_length].tolist() == list(prompt.token_ids)
        assert trace.category == prompt.category
        assert trace.num_tokens == len(prompt.token_ids) + 12
        output = model(input_ids=trace.token_ids[None, :-1], output_hidden_states=True)
        # hidden_states[0] is the embedding: the output of layer i is entry i + 1.
        expected = torch.cat([output.hidden_states[i + 1] for i in AUX_LAYER_IDS], dim=-1)[0]
        torch.testing.assert_close(trace.features, expected, rtol=0, atol=1e-5)
        assert torch.equal(trace.target_top1, output.logits[0].argmax(-1))


def test_a_prompt_ends_with_the_first_end_of_text(
    traces: TraceFolder, target: Path, tmp_path: Path
) -> None:
    first = next(iter(traces))
    end = first.continuation[4]
    ending = tmp_path / "ending"
    shutil.copytree(target, ending)
    for name in ("config.json", "generation_config.json"):
        keys = json.loads((ending / name).read_text(encoding="utf-8"))
        (ending / name).write_text(
            json.dumps(keys | {"eos_token_id": [end, VOCAB - 1]}), encoding="utf-8"
        )
    cut = record_traces(ending, PROMPTS, tmp_path / "cut", max_new_tokens=12, dtype="float64")
    shorter = 0
    for got, full in zip(cut, traces, strict=True):
        ends = [i for i, token in enumerate(full.continuation) if token in (end, VOCAB - 1)]
        count = ends[0] + 1 if ends else 12
        shorter += count < 12
        assert got.continuation == full.continuation[:count]
        assert got.features.shape[0] == got.num_tokens - 1
    assert shorter >= 1
    assert not cut.manifest.ignore_eos
    on = record_traces(
        ending, PROMPTS, tmp_path / "on", max_new_tokens=12, dtype="float64",
        decoding=Decoding(ignore_eos=True),
    )  # fmt: skip
    assert [one.continuation for one in on] == [one.continuation for one in traces]
    assert on.manifest.ignore_eos
    with pytest.raises(TraceError, match="another decoding than"):
        merge_traces([cut, on], tmp_path / "merged")


def test_features_are_rounded_once_where_they_are_stored_narrower(
    target: Path, tmp_path: Path
) -> None:
    wide, narrow = (
        record_traces(target, PROMPTS[:2], tmp_path / str(to), max_new_tokens=4, stored=to)
        for to in (None, "bfloat16")
    )
    assert narrow.manifest.features.dtype == "bfloat16"
    assert (wide.manifest.target.name, wide.manifest.target.num_layers) == ("target", 8)
    for one, other in zip(wide, narrow, strict=True):
        assert torch.equal(other.token_ids, one.token_ids)
        assert torch.equal(other.features, one.features.bfloat16())


def test_fused_features_are_fc_of_the_aux_features(
    target: Path, tmp_path: Path, traces: TraceFolder
) -> None:
    draft = load_draft(save_draft(tmp_path / "draft", target), dtype=torch.float64)
    fused = record_traces(
        target, PROMPTS, tmp_path / "fused", max_new_tokens=12, fuse_with=draft, dtype="float64"
    )
    assert fused.manifest.features.kind == "fused"
    assert fused.manifest.features.fusion_sha256 == draft.fusion_sha256
    for got, aux in zip(fused, traces, strict=True):
        expected = aux.features @ draft.weights["fc.weight"].T
        torch.testing.assert_close(got.features, expected, rtol=0, atol=1e-4)
    check_trace_fits(draft, fused)
    check_trace_fits(draft, traces)
    with pytest.raises(TraceError, match="load the draft in the dtype"):
        record_traces(target, PROMPTS, tmp_path / "x", max_new_tokens=3, fuse_with=draft)
    other = load_draft(save_draft(tmp_path / "other", target, seed=5), dtype=torch.float64)
    with pytest.raises(TraceError, match="the fc of another draft fused"):
        check_trace_fits(other, fused)


@torch.no_grad()
def test_a_draft_without_fc_gets_the_state_behind_the_final_norm(
    target: Path, tmp_path: Path, traces: TraceFolder, model: LlamaForCausalLM
) -> None:
    """The last of transformers' hidden states is that behind the norm; 1e-5 as above."""
    folder = save_draft(tmp_path / "draft", target)
    tensors = read_tensors(folder)
    del tensors["fc.weight"]
    write_tensors(folder, tensors)
    edit_json(folder / "config.json", eagle_config={"use_aux_hidden_state": False})
    draft = load_draft(folder, dtype=torch.float64)
    last = record_traces(
        target, PROMPTS, tmp_path / "last", max_new_tokens=12, fuse_with=draft, dtype="float64"
    )
    assert last.manifest.features.aux_layer_ids == (last.manifest.target.num_layers - 1,)
    for got, other in zip(last, traces, strict=True):
        assert torch.equal(got.token_ids, other.token_ids)
        states = model(got.token_ids[None], output_hidden_states=True).hidden_states
        expected = states[-1][0, : len(got.features)]
        torch.testing.assert_close(got.features, expected, rtol=0, atol=1e-5)
    check_trace_fits(draft, last)
    (played,) = replay_drafts([draft], last, num_draft_tokens=3)
    assert len(played.prompts) == len(PROMPTS)
    with pytest.raises(TraceError, match="reads the target's last hidden state"):
        check_trace_fits(draft, traces)


def test_traces_that_do_not_fit_a_draft(target: Path, tmp_path: Path, traces: TraceFolder) -> None:
    for i, (config, message) in enumerate((
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}},
         r"reads the target layers \[2, 4, 5\] .*the traces hold \[1, 3, 4\]"),
        ({"target_hidden_size": 32}, "expects aux features of width 96, but the traces hold"),
    )):  # fmt: skip
        asked: dict[str, Any] = dict(config)
        folder = save_draft(tmp_path / f"draft{i}", target, **asked)
        tensors = load_file(folder / "model.safetensors")
        width = asked.get("target_hidden_size", HIDDEN)
        tensors["fc.weight"] = tensors["fc.weight"][:, : 3 * width]
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
        with pytest.raises(TraceError, match=message) as caught:
            check_trace_fits(load_draft(folder), traces)
        assert re.search(r"fix: (record|use traces that were recorded for)", str(caught.value))


def test_default_layers() -> None:
    assert default_aux_layer_ids(61) == (1, 29, 57)
    assert default_aux_layer_ids(8) == (1, 3, 4)
    assert default_aux_layer_ids(7) == (1, 2, 3)
    with pytest.raises(TraceError, match="not ascending") as caught:
        default_aux_layer_ids(6)
    assert "--aux-layers" in str(caught.value)


def test_arguments_that_do_not_fit_the_target(target: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
        ({"prompts": [Prompt(id="x", category="a", token_ids=(VOCAB,))]}, f"ids below {VOCAB}"),
        ({"max_new_tokens": 510}, r"at most 512 tokens .*\nprompt p0: 519 tokens"),
        ({"aux_layer_ids": (1, 8)}, r"ascending ids in \[0, 8\)"),
        ({"aux_layer_ids": (3, 1)}, "ascending"),
        ({"aux_layer_ids": ()}, "ascending"),
    ):
        arguments: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 3} | changes
        prompts = arguments.pop("prompts")
        with pytest.raises(TraceError, match=message):
            record_traces(target, prompts, tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_may_fill_the_positions_of_the_target(target: Path, tmp_path: Path) -> None:
    """512 positions: 509 tokens and 3 new ones fit, one more does not."""
    full = Prompt(id="full", category="a", token_ids=prompt_tokens(1, 509)[0])
    (trace,) = record_traces(target, [full], tmp_path / "out", max_new_tokens=3)
    assert trace.num_tokens == 512
    with pytest.raises(TraceError, match="prompt full: 513 tokens, prompt and continuation"):
        record_traces(target, [full], tmp_path / "more", max_new_tokens=4)


def test_targets_that_cannot_be_loaded(target: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"config\.json: no such file"):
        record_traces(tmp_path, PROMPTS, tmp_path / "out", max_new_tokens=3)
    for name, message in (("missing", "1 weight.* missing, such as model.norm"),
                          ("remote", "cannot load this target")):  # fmt: skip
        folder = tmp_path / name
        shutil.copytree(target, folder)
        if name == "missing":
            tensors = load_file(folder / "model.safetensors")
            del tensors["model.norm.weight"]
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        else:
            (folder / "config.json").write_text('{"model_type": "no such model"}', encoding="utf-8")
        with pytest.raises(TraceError, match=message):
            record_traces(folder, PROMPTS, tmp_path / "out", max_new_tokens=3)
    assert not (tmp_path / "out").exists()
