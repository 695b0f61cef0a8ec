"""Small language models as drafts: replayed as transformers' own models decode, round by round."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import corpus
import draftquant.api as dq
import pytest
import torch
from by_recipe import draft_of
from draftquant.calibration.passes.draft_inputs import first_hidden
from draftquant.calibration.passes.memory import estimate_replay
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored import online_rounding
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.online_rounding import quantized_head
from draftquant.quantize.stored.stored_tables import EMBEDDING, HEAD
from draftquant.recipes.errors import CheckpointError
from draftquant.recipes.formats import OnlineHead
from draftquant.scripts.cli import main
from draftquant.validate.counting.trace_replay import accepted_by_row, decoding_steps, replay_drafts
from proposing import draft_proposals
from recorded import record_traces
from reference_draft import transformers_in_float64
from tied_pair import prompt_tokens, prompts_of, save_draft, save_target
from tiny import config_of, tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_llama import tiny_language_model
from tiny_mtp import tiny_step3p5_mtp
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language-model")
    save_target(folder / "target")
    prompts = prompts_of([*prompt_tokens(1, 12), *prompt_tokens(1, 1)])
    target, traces = folder / "target", folder / "traces"
    with transformers_in_float64():
        record_traces(target, prompts, traces, max_new_tokens=24, dtype="float64")
    return folder


def save_of_kind(folder: Path, target: Path, kind: str) -> Path:
    """The target with noise in its weights, in another kind's layers; tied only for "tied"."""
    torch.manual_seed(3)
    source = LlamaForCausalLM.from_pretrained(target)
    keys = {k: v for k, v in source.config.to_dict().items() if k not in ("model_type", "dtype")}
    model: PreTrainedModel = source
    if kind == "Qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**keys))
    if kind == "Qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**keys))
    with torch.no_grad():
        weights = model.state_dict()
        for name, weight in weights.items():
            if name in source.state_dict():
                weight.copy_(source.state_dict()[name])
            if "layers" in name:
                weight.add_(torch.randn_like(weight) * 0.3 * weight.std().nan_to_num(1.0))
        if kind == "tied":
            weights["model.embed_tokens.weight"].copy_(weights["lm_head.weight"])
            model.config.tie_word_embeddings = True
            model.tie_weights()
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def decoded_rounds(draft: PreTrainedModel, tokens: Sequence[int], prompt_length: int) -> list[int]:
    """Accepted tokens per round: the draft reads all committed tokens anew for each one of its."""
    accepted, last = [], prompt_length
    while last + K < len(tokens):
        text = list(tokens[: last + 1])
        for _ in range(K):
            text.append(int(draft(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
        right = [a == b for a, b in zip(text[last + 1 :], tokens[last + 1 :], strict=False)]
        accepted.append(right.index(False) if False in right else K)
        last += accepted[-1] + 1
    return accepted


def proposals(draft: Any, traces: TraceFolder, trace: Any) -> Tensor:
    hidden, how = first_hidden(draft, traces, trace), {"num_draft_tokens": K, "block_rows": 7}
    first = trace.prompt_length - 1
    return draft_proposals(draft.forward, hidden, trace.token_ids, first_row=first, **how).token_ids


@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "tied"])
def test_replay_is_decoding_with_transformers(kind: str, folder: Path, tmp_path: Path) -> None:
    path = save_of_kind(tmp_path / "draft", folder / "target", kind)
    draft = load_draft(path, dtype=torch.float64)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    traces, some = TraceFolder.open(folder / "traces"), 0
    for trace in traces:
        expected = decoded_rounds(model, trace.token_ids.tolist(), trace.prompt_length)
        predicted = proposals(draft, traces, trace)
        assert decoding_steps(accepted_by_row(trace, predicted)) == expected
        likely = model(input_ids=trace.token_ids[None]).logits[0].argmax(-1)
        first = predicted[:, 0]
        assert torch.equal(first, likely[trace.prompt_length :][: len(first)])
        some += sum(expected)
    assert some > 5 or kind == "tied"  # whose head is another table than the target's
    (counted,) = replay_drafts([draft], traces, num_draft_tokens=K)
    assert sum(i * n for i, n in enumerate(counted.counts.histogram)) == some


@pytest.mark.usefixtures("float64_on_one_thread")
def test_what_config_json_does_not_say(tmp_path: Path) -> None:
    """A model is not tied, and Qwen2's attention has biases of its inputs alone."""
    source = tiny_language_model(tmp_path / "draft", kind="Qwen2", config={"attention_bias": True})
    config = config_of(source)
    del config["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    geometry = draft_of(source).geometry
    attention = geometry.attention
    assert (geometry.tied, attention.input_bias, attention.output_bias) == (False, True, False)
    dq.quantize(source, "fp8-ptpc", tmp_path / "out")
    assert dq.inspect(tmp_path / "out").audit.faults == ()  # type: ignore[union-attr]


# ---- heads that vLLM quantizes while it loads a draft: `--head-online`


ENGINES = Path(__file__).parents[1] / "experiments" / "engines"
RECORDED = json.loads((ENGINES / "online_head.json").read_text(encoding="utf-8"))
SHAPES = {"BF16": (97, 64), "F16": (40, 48), "BF16 of every size": (1024, 64)}


def heads() -> dict[str, Tensor]:
    """Heads with what breaks quantizers: rows of zeros, tiny ones, groups of zeros, every number.

    Made without a random generator, so that every version of torch makes the same.
    """
    found = {}
    for name, (rows, columns) in SHAPES.items():
        if "every" in name:
            bits = torch.arange(rows * columns, dtype=torch.int32).to(torch.int16)
            head = bits.view(torch.bfloat16).reshape(rows, columns)
            head = torch.where(head.abs() < 100, head, 0)
        else:
            steps = torch.arange(rows * columns).reshape(rows, columns)
            head = ((steps * 7919) % 1009 - 504).float() / 5040
            head[3], head[5, :16] = 0, 0
            head[4] *= 1e-4
            head = head.to(torch.float16 if name == "F16" else torch.bfloat16)
        found[name] = head
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("how", ["fp8", "nvfp4"])
def test_it_is_what_vllms_own_functions_make(how: OnlineHead) -> None:
    for name, head in heads().items():
        numbers = (quantized_head(head, how) + 0.0).contiguous().numpy()  # zeros have no sign
        assert hashlib.sha256(numbers.tobytes()).hexdigest() == RECORDED[name][how], name
        half = head.clamp(min=0)
        assert torch.equal(quantized_head(-half, how), -quantized_head(half, how)), name


# ---- which drafts get one


def own_tables(folder: Path) -> dict[str, Tensor]:
    """A target with the tables of the draft."""
    weights = load_draft(folder).weights
    return {name: weights[name].to(torch.bfloat16) for name in (EMBEDDING, HEAD)}


def changed(folder: Path) -> dict[str, Tensor]:
    shared = own_tables(folder)
    shared[HEAD][7, 5] += 1
    return shared


def zeros(_: Path) -> dict[str, Tensor]:
    return dict.fromkeys((HEAD, EMBEDDING), torch.zeros(96, 64))


REFUSED: tuple[tuple[Callable[[Path], Path], Callable[[Path], dict[str, Tensor]]], ...] = (
    (tiny_eagle3_llama, lambda _: {}),
    (tiny_eagle3_llama, changed),
    (lambda to: tiny_eagle3_llama(to, pruned_vocabulary=True), zeros),
    (lambda to: shutil.copytree(corpus.quantized("eagle3-llama", "fp8-ptpc-head"), to), zeros),
    (tiny_dflash, zeros),
    (tiny_step3p5_mtp, zeros),
)


@pytest.mark.usefixtures("one_thread")
def test_what_vllm_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_rounding, "_ROWS", 4)  # row 7 is of the second block
    for number, (write, tables) in enumerate(REFUSED):
        folder = write(tmp_path / str(number))
        with pytest.raises(CheckpointError):
            load_draft(folder, shared=tables(folder), online_head="fp8")
    folder = tiny_eagle3_llama(tmp_path / "draft", hidden=72)
    shared = own_tables(folder)
    assert load_draft(folder, shared=shared, online_head="fp8").quantized
    with pytest.raises(CheckpointError, match="groups of 16 inputs, and the head has 72"):
        load_draft(folder, shared=shared, online_head="nvfp4")


# ---- in replay and gate


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_replay_and_judgement_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_target(tmp_path / "target")
    draft = str(save_draft(tmp_path / "draft", target))
    asked = prompts_of(prompt_tokens(3, 7))
    record_traces(target, asked, tmp_path / "traces", max_new_tokens=60, table_ids=())
    estimate = estimate_replay(
        [Path(draft), Path(draft)],
        TraceFolder.open(tmp_path / "traces"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_draft_tokens=1,
        batch_size=None,
        online_heads=[None, "nvfp4"],
    )
    assert estimate.drafts[1].own == 4 * 96 * 64  # in float32; all else is the first one's
    given = ["--traces", str(tmp_path / "traces"), "--head-online", "nvfp4", "-k", "1", "--json"]
    assert main(["replay", draft, draft, *given]) == 0
    plain, served = json.loads(capsys.readouterr().out)
    assert (plain["name"], plain["head_online"]) == ("draft", None)
    assert (served["name"], served["head_online"]) == ("draft, head nvfp4 online", "nvfp4")
    assert main(["gate", draft, draft, *given]) == 3  # three prompts decide nothing
    report = json.loads(capsys.readouterr().out)
    assert report["drafts"]["candidate"]["quantization"] == "none, head nvfp4 online"
    assert any('"draft_lm_head_quantization": "nvfp4"' in one for one in report["warnings"])
    assert main(["gate", draft, draft, *given[:2]]) == 2
