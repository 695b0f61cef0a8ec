"""Recording from a transformers target: features, greedy tokens, ends, determinism, refusals."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant import api as dq
from draftquant.calibration.passes.draft_inputs import check_trace_fits
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.decoding import (
    Decoding,
    choose,
    processed_logprobs,
    prompt_draws,
)
from draftquant.calibration.recording.target_model import cache_argument
from draftquant.calibration.traces.manifest import TooLongPrompts
from draftquant.calibration.traces.sets import merge_traces
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import TraceError
from draftquant.scripts.cli import main
from draftquant.validate.counting.trace_replay import replay_drafts
from recorded import record_traces
from safetensors.torch import load_file, save_file
from tied_pair import AUX_LAYER_IDS, HIDDEN, VOCAB, prompt_tokens, save_draft, save_target
from tiny import edit_json, read_tensors, write_tensors
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

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
def test_features_and_tokens_of_one_pass(traces: TraceFolder, model: LlamaForCausalLM) -> None:
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


def test_a_text_ends_with_its_first_end(traces: TraceFolder, target: Path, tmp_path: Path) -> None:
    end = next(iter(traces)).continuation[4]
    ending = tmp_path / "ending"
    shutil.copytree(target, ending)
    for name in ("config.json", "generation_config.json"):
        edit_json(ending / name, eos_token_id=[end, VOCAB - 1])
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
    with pytest.warns(dq.DraftQuantWarning, match=f"{shorter} of {len(cut)} texts end with the"):
        more = dq.record(ending, cut.folder, tmp_path / "longer", max_new_tokens=2, continued=True)
    assert len(more) == len(cut) - shorter
    whole = dq.record(
        ending, cut.folder, tmp_path / "whole", max_new_tokens=2, continued=True, ignore_eos=True
    )
    assert len(whole) == len(cut)
    with pytest.raises(TraceError, match="another decoding than"):
        merge_traces([cut, on], tmp_path / "merged")


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
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    configs: tuple[dict[str, Any], ...] = {"eagle_config": ids}, {"target_hidden_size": 32}
    for i, asked in enumerate(configs):
        folder = save_draft(tmp_path / f"draft{i}", target, **asked)
        tensors = load_file(folder / "model.safetensors")
        width = asked.get("target_hidden_size", HIDDEN)
        tensors["fc.weight"] = tensors["fc.weight"][:, : 3 * width]
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
        with pytest.raises(TraceError):
            check_trace_fits(load_draft(folder), traces)


def test_arguments_that_do_not_fit_the_target(target: Path, tmp_path: Path) -> None:
    beyond = [Prompt(id="x", category="a", token_ids=(VOCAB,))]
    wrong: list[dict[str, Any]] = [{"prompts": beyond}, {"max_new_tokens": 510}]
    for changes in (*wrong, *({"aux_layer_ids": ids} for ids in ((1, 8), (3, 1), ()))):
        arguments: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 3} | changes
        prompts = arguments.pop("prompts")
        with pytest.raises(TraceError):
            record_traces(target, prompts, tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_targets_that_cannot_be_loaded(target: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"config\.json: no such file"):
        record_traces(tmp_path, PROMPTS, tmp_path / "out", max_new_tokens=3)
    for name in ("missing", "remote"):
        folder = tmp_path / name
        shutil.copytree(target, folder)
        if name == "missing":
            tensors = load_file(folder / "model.safetensors")
            del tensors["model.norm.weight"]
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        else:
            (folder / "config.json").write_text('{"model_type": "no such model"}', encoding="utf-8")
        with pytest.raises(TraceError):
            record_traces(folder, PROMPTS, tmp_path / "out", max_new_tokens=3)
    assert not (tmp_path / "out").exists()


# ---- targets and prompts that do not fit


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 512 positions, width 64 and 8 layers, and its draft."""
    folder = tmp_path_factory.mktemp("fit")
    save_draft(folder / "draft", save_target(folder / "target"))
    return folder


def bare(pair: Path, folder: Path, **changes: Any) -> Path:
    """The target's config.json, changed, and nothing else."""
    folder.mkdir()
    config = json.loads((pair / "target" / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return folder


def prompt_file(folder: Path, *lengths: int) -> Path:
    path = folder / "prompts.jsonl"
    lines = (
        {"id": f"p{i}", "category": "a", "token_ids": [(1 + i + j) % VOCAB for j in range(n)]}
        for i, n in enumerate(lengths)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_target_that_cannot_feed_the_draft(pair: Path, tmp_path: Path) -> None:
    prompts, draft = prompt_file(tmp_path, 4), pair / "draft"
    cases: list[tuple[Any, str, int]] = [
        ("vllm", "hidden_size", 80),
        ("transformers", "vocab_size", 128),
        ("vllm", "num_hidden_layers", 4),
    ]
    for engine, key, value in cases:
        target = bare(pair, tmp_path / key, **{key: value})
        with pytest.raises(TraceError):
            dq.record(target, prompts, tmp_path / "out", draft=draft, engine=engine)
        assert not (tmp_path / "out").exists()


def test_all_prompts_that_do_not_fit_are_named_at_once(pair: Path, tmp_path: Path) -> None:
    target = bare(pair, tmp_path / "bare")
    prompts = prompt_file(tmp_path, 600, 510, 511, 512)
    with pytest.raises(TraceError):
        dq.record(target, prompts, tmp_path / "out", max_new_tokens=2, aux_layer_ids=(1,))


@pytest.mark.parametrize("how", ["skip", "truncate"])
def test_too_long_prompts_are_left_out_or_cut_said_and_recorded(
    how: str, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = prompt_file(tmp_path, 5, 511, 6, 520), tmp_path / "out"
    arguments = ("--target", str(pair / "target"), "--prompts", str(prompts), "--out", str(out))
    assert main(["record", *arguments, "--max-new-tokens", "2", "--too-long", how]) == 0
    done = {"skip": "left out", "truncate": "cut to their last tokens"}[how]
    said = " ".join(capsys.readouterr().err.split())
    assert f"2 of 4 prompts are {done}: with 2 new tokens they exceed the target's 512" in said
    traces = TraceFolder.open(out)
    long = ("p1", "p3")
    if how == "skip":
        assert [trace.id for trace in traces] == ["p0", "p2"]
        assert traces.manifest.too_long == TooLongPrompts(skipped=long)
    else:
        assert [trace.prompt_length for trace in traces] == [5, 510, 6, 510]
        assert traces.manifest.too_long == TooLongPrompts(truncated=long)
        (cut,) = (trace for trace in traces if trace.id == "p1")
        whole = json.loads(prompts.read_text(encoding="utf-8").splitlines()[1])["token_ids"]
        assert cut.token_ids[:510].tolist() == whole[-510:]
    assert main(["traces", "info", str(out)]) == 0
    counts = "2 prompts left out, 0 cut" if how == "skip" else "0 prompts left out, 2 cut"
    assert counts in capsys.readouterr().out


# ---- how a text is continued: the distribution drawn from, and what is recorded of it

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


def test_sampled_traces_hold_the_probabilities_drawn_from(target: Path, tmp_path: Path) -> None:
    """Against the target itself, which reads the recorded text again."""
    decoding = Decoding(temperature=0.7, top_p=0.9, top_k=20, num_top_logprobs=2)
    given: Any = {"aux_layer_ids": (0, 1, 2), "batch_size": 3, "max_new_tokens": 12}
    traces = record_traces(target, PROMPTS[:3], tmp_path / "t", decoding=decoding, **given)
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


@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"top_k": 5}])
def test_values_that_greedy_decoding_does_not_use(changes: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match="greedy") as caught:
        dataclasses.replace(Decoding(), **changes)
    assert caught.value.where == "--temperature"


def test_the_cache_goes_in_under_the_name_that_the_forward_pass_has() -> None:
    class Before:
        def forward(self, input_ids: Any, past_key_values: Any = None, **more: Any) -> None: ...

    class Since:  # as in transformers 5.24
        def forward(self, input_ids: Any, cache: Any = None, **more: Any) -> None: ...

    assert [cache_argument(model()) for model in (Before, Since)] == ["past_key_values", "cache"]
