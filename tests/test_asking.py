"""`check --ask`: what a stub of vLLM says is judged, and what may go wrong with it is said."""

import dataclasses
import json
import os
import select
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import corpus
import pytest
import torch
from draftquant import api as dq
from draftquant.quantize.asked import Checking
from draftquant.quantize.asking import ask
from draftquant.quantize.asking.ask import DraftQuestion
from draftquant.quantize.asking.child_process import ANSWER, REQUEST, Answer, read_answer
from draftquant.quantize.asking.inside import answer, in_vllm, loaded_model
from draftquant.quantize.asking.linear_judge import AskedLinear, judge, random_inputs
from draftquant.recipes.errors import CheckpointError, DeviceError, DraftQuantError
from draftquant.scripts.cli import main
from draftquant.validate.runs.report_pages import draft_identity
from tiny import edit_json
from torch import Tensor

STUB = Path(__file__).parent / "asked_engine"
Weight = Callable[[dict[str, Tensor], str], Tensor]


def interpreter(folder: Path, fault: str = "", before: str = "") -> Path:
    """An interpreter that finds the stub as vllm."""
    script = folder / "python"
    environment = f"PYTHONPATH={STUB} STUB={fault} PYTHONDONTWRITEBYTECODE=1"
    script.write_text(f'#!/bin/sh\n{before}\nexec env {environment} {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def child_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child does, done in this process."""

    def run(_python: str, work: Path, _seconds: int) -> Answer:
        answer.main(str(work / REQUEST))
        assert '{"stage": "target"}\n' in (work / ANSWER).read_text()  # the process may die in it
        return read_answer(work)

    monkeypatch.setattr(ask, "run_child", run)
    monkeypatch.setattr(in_vllm, "ENVIRONMENT", {})
    monkeypatch.syspath_prepend(STUB)
    monkeypatch.setenv("STUB", "")
    monkeypatch.setenv("COLUMNS", "500")


ASK_HERE = ("check", "--engine", "vllm", "--ask", sys.executable)


@pytest.fixture(scope="module")
def draft() -> Path:
    return corpus.quantized("eagle3-llama", "fp8-ptpc")


def test_a_draft_that_is_served_as_it_is_stored(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = interpreter(tmp_path)
    code = main(["check", str(draft), "--engine", "vllm", "--ask", str(python), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["verdict"], found["stage"]) == (0, "LOADS", "loaded")
    assert found["sentence"].startswith(
        f"vLLM 0.31.0 in {python} on the CPU loaded this draft, and"
    )
    parts = sorted(each["part"].rpartition(".")[2] for each in found["linears"])
    assert parts == [f"{name}_proj" for name in ("down", "gate", "k", "o", "q", "up", "v")]
    assert all(0 < each["error"] < each["bound"] < 0.06 for each in found["linears"])
    assert found["memory"] > 2**20
    assert found["draft_sha256"] == draft_identity(draft).draft_sha256


FAULTS = ("doubled", "dropped", "floats", "refused", "contexts", "head")
NONE = ("table", "own head", "V1 head", "none")
"""Of the stub: what `check` says of each is kept."""


@pytest.mark.parametrize("fault", [*FAULTS, *NONE])
@pytest.mark.usefixtures("child_is_here")
def test_a_draft_that_is_not(fault: str, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB", fault)
    assert main([*ASK_HERE, str(draft)]) == (fault in FAULTS)


@pytest.mark.usefixtures("child_is_here")
@pytest.mark.parametrize(("rows", "whole"), [(None, True), (96, True), (48, False)])
def test_zeros_map_the_whole_vocabulary(rows: int | None, whole: bool, tmp_path: Path) -> None:
    said = {"text_config": {"vocab_size": 96, "draft_vocab_size": rows}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    unused = in_vllm.shard(Mock(), Mock(), tmp_path).unused
    assert bool(unused.search("draft_id_to_target_id")) is whole


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crash", "signal SIGSEGV (init)"),
        ("hang", "within 9 s, got none (init)"),
        ("memory", "too little memory on its GPU (run)"),
        ("start", "take the config.json of the target: TypeError"),
        ("interfaces", "or wants other arguments: vllm.model_executor.model_loader.default"),
        ("signature", "or wants other arguments: run_linears: TypeError: "),
        ("changed", "files changed"),
    ],
)
def test_no_answer_is_no_verdict(
    draft: Path, tmp_path: Path, fault: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    copy, held = shutil.copytree(draft, tmp_path / "draft"), tmp_path / "held"
    os.mkfifo(held)
    asked = interpreter(tmp_path, fault, before=f"sleep 99 > {held} &")
    end = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises((DeviceError, CheckpointError), match="fix: ") as raised:
        dq.check(copy, "vllm", ask=asked, ask_seconds=9 if fault == "hang" else 600)
    assert said in str(raised.value)
    assert select.select([end], [], [], 9)[0]  # nothing that was started is left, and has it open
    os.close(end)
    assert list(temporary.iterdir()) == []


def test_interpreters_without_an_engine(draft: Path, tmp_path: Path) -> None:
    """None, one that is no Python, one without vLLM, one without torch."""
    bare = interpreter(tmp_path, before=f'exec {sys.executable} -I -S "$@"')
    for python in (tmp_path / "absent", "/bin/false", bare):
        with pytest.raises(DeviceError):
            dq.check(draft, "sglang", ask=python)
    assert main(["check", str(draft), "--engine", "sglang", "--ask"]) == 2


CODE = {"AutoModel": "modeling.Draft", "AutoConfig": "owner/name--configuration.Config"}


@pytest.mark.usefixtures("child_is_here")
def test_code_of_a_folder_does_not_get_to_the_engine(draft: Path, tmp_path: Path) -> None:
    """The answer says so. auto_map may stand at any depth; an engine is to see its null."""
    copy = Path(shutil.copytree(draft, tmp_path / "copy"))
    edit_json(copy / "config.json", auto_map=CODE, eagle_config={"auto_map": None, "x": [1]})
    left_out = ["training_args.bin", "weights.pt", "code/modeling.py"]
    (copy / "code").mkdir()
    for name, text in {
        **dict.fromkeys(left_out, "raise SystemExit"),
        "tokenizer_config.json": json.dumps({"of": [{"auto_map": CODE}]}),
        "broken.json": "{",
    }.items():
        (copy / name).write_text(text)
    (work := tmp_path / "work").mkdir()
    DraftQuestion.of(Checking(copy, "vllm")).write(work)
    given = {path.name: path for path in (work / "draft").iterdir()}
    own = {path.name for path in draft.iterdir() if path.suffix != ".md"}
    assert given.keys() == own | {"tokenizer_config.json"}
    assert json.loads(given["tokenizer_config.json"].read_text()) == {"of": [{}]}
    config = json.loads(given["config.json"].read_text())
    assert "auto_map" not in config
    assert config["eagle_config"] == {"auto_map": None, "x": [1]}
    assert main([*ASK_HERE, str(copy)]) == 0


def test_code_of_a_target_does_not_get_to_the_engine(draft: Path, tmp_path: Path) -> None:
    """Nor is any engine told to trust code."""
    target, work = tmp_path / "target", tmp_path / "work"
    target.mkdir()
    work.mkdir()
    text = {"hidden_size": 64, "vocab_size": 96, "num_hidden_layers": 9, "auto_map": CODE}
    (target / "config.json").write_text(json.dumps({"text_config": text, "auto_map": CODE}))
    (target / "modeling.py").write_text("raise SystemExit")
    left_out = DraftQuestion.of(Checking(draft, "vllm", target=target)).write(work)
    assert left_out == ("auto_map of the target's config.json",)
    (given,) = (work / "target").iterdir()
    modules = Path(answer.__file__).parent.glob("*.py")
    for path, word in ((given, "auto_map"), *((each, "trust_remote_code") for each in modules)):
        assert word not in path.read_text()


@pytest.mark.parametrize(
    "given", [{"engine": None}, {"engine": "tensorrt-llm"}, {"gpu": "h200"}, {"tp": 2}]
)
def test_options_that_an_installed_engine_answers_itself(draft: Path, given: Any) -> None:
    with pytest.raises(DraftQuantError, match=r"fix: (leave out|name the engine)"):
        dq.check(draft, **{"engine": "vllm", **given}, ask="python")


def test_a_target_of_another_width(draft: Path, tmp_path: Path) -> None:
    other = corpus.PAIRS / "eagle3-llama" / "target"
    question = DraftQuestion.of(Checking(draft, "vllm", ask="python", target=other))
    with pytest.raises(CheckpointError, match="the target's"):
        question.write(tmp_path)


# ---- The judge, on outputs that are made here


def judged(
    folder: Path,
    weight: Weight = lambda weights, part: weights[part],
    inputs: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, AskedLinear]:
    """Every linear of a folder as an engine in BF16 computes it with these weights and inputs."""
    stored = DraftQuestion.of(Checking(folder, "vllm")).stored
    rows = {row.module: row for row in stored.draft.rows if stored.is_quantized(row)}
    decoded = {name: stored.linear(row).decoded().dequantized() for name, row in rows.items()}
    weights = {name: torch.from_numpy(w).bfloat16().float() for name, w in decoded.items()}
    together = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    fused = [[name for name in rows if name.rpartition(".")[2] in leaves] for leaves in together]
    modules = [*fused, *([name] for name in rows if not any(name in each for each in fused))]
    lines, outputs = [], {}
    for parts in filter(None, modules):
        parts = sorted(parts, key=lambda name: "qkvgu".index(name.rpartition(".")[2][0])
                       if len(parts) > 1 else 0)  # fmt: skip
        x = inputs(random_inputs(weights[parts[0]].shape[1]).float())
        y = torch.cat([x @ weight(weights, part).T for part in parts], dim=1)
        outputs[parts[0]] = y.bfloat16().float()
        lines.append({"module": parts[0], "parts": parts, "kernel": "", "dtype": "torch.bfloat16"})
    return {each.part.rpartition(".")[2]: each for each in judge(stored, lines, outputs)}


RECIPES = ("fp8-ptpc", "int4-channel", "int4-group128", "mi325x-int4-awq", "mxfp4-weights",
           "nvfp4-weights", "mi325x-w4a8", "mi355-mxfp4")  # fmt: skip


@pytest.mark.some(4)
@pytest.mark.parametrize("recipe", RECIPES)
def test_sixteen_bits_and_inputs_that_are_not_rounded_are_within_the_bound(recipe: str) -> None:
    found = judged(corpus.quantized("eagle3-llama", recipe, pair=True))
    assert [each.is_right for each in found.values()] == [True] * 7
    assert max(each.error for each in found.values()) < 0.25


def replaced(leaf: str, change: Callable[[Tensor], Tensor]) -> Weight:
    def weight(weights: dict[str, Tensor], part: str) -> Tensor:
        return change(weights[part]) if part.endswith(leaf) else weights[part]

    return weight


def swapped(weight: Tensor) -> Tensor:
    return weight.reshape(len(weight), -1, 2).flip(-1).reshape(weight.shape)


def reordered(weight: Tensor, order: Sequence[int] = (0, 2, 4, 6, 1, 3, 5, 7)) -> Tensor:
    return weight.reshape(len(weight), -1, 8)[..., order].reshape(weight.shape)


def one_row(weight: Tensor) -> Tensor:
    changed = weight.clone()
    changed[3] *= 2
    return changed


@pytest.mark.parametrize(
    ("leaf", "change", "cause"),
    [
        ("k_proj", swapped, "the two values of each byte are swapped"),
        ("up_proj", reordered, "the nibbles of each word are in another order"),
        ("up_proj", partial(reordered, order=(0, 4, 1, 5, 2, 6, 3, 7)), "the nibbles of each word"),
        ("o_proj", lambda w: w * 2, "times 2^+1"),
        ("down_proj", lambda w: w / 8, "times 2^-3"),
        ("v_proj", lambda w: w * 1.3, "1.3 times"),
        ("q_proj", lambda w: w * float("nan"), "not finite"),
        ("gate_proj", torch.zeros_like, "all outputs are 0"),
        ("q_proj", one_row, None),
    ],
)
def test_a_mistake_is_found_and_named(
    leaf: str, change: Callable[[Tensor], Tensor], cause: str | None
) -> None:
    folder = corpus.quantized("eagle3-llama", "int4-group128", pair=True)
    found = judged(folder, replaced(leaf, change))
    assert [name for name, each in found.items() if not each.is_right] == [leaf]
    assert (cause in (found[leaf].cause or "")) if cause else found[leaf].cause is None
    if change is one_row:
        assert found[leaf].output == 3


def test_scales_or_a_weight_of_another_part_and_no_scales() -> None:
    """Rows of gate with scales of up, or those of up: the two have as many rows."""
    folder = corpus.quantized("eagle3-llama", "int4-channel", pair=True)
    stored = DraftQuestion.of(Checking(folder, "vllm")).stored
    rows = [row for row in stored.draft.rows if stored.is_quantized(row)]
    scales = {row.module: torch.from_numpy(stored.linear(row).scale) for row in rows}

    def weight(weights: dict[str, Tensor], part: str) -> Tensor:
        if part.endswith("down_proj"):
            return weights[part] / scales[part]
        if part.endswith("k_proj"):
            return weights[part.replace("k_", "v_")]
        if not part.endswith("gate_proj"):
            return weights[part]
        return weights[part] / scales[part] * scales[part.replace("gate", "up")]

    found = judged(folder, weight)
    assert {name: each.cause for name, each in found.items() if not each.is_right} == {
        "gate_proj": "the scales of up_proj are taken",
        "k_proj": "it is computed with v_proj",
        "down_proj": "the scales are not applied",
    }


def test_a_square_weight_that_is_transposed_and_inputs_in_eight_bits() -> None:
    folder = corpus.quantized("eagle3-llama", "int4-group128", pair=True)
    square = judged(folder, lambda weights, part: weights[part].T
                    if part.endswith("o_proj") else weights[part])  # fmt: skip
    assert square["o_proj"].cause == "the weight is transposed"

    def rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    assert {each.cause for each in judged(folder, inputs=rounded).values()} == {
        "inputs are rounded to INT8, which is not declared"
    }


def test_worst_is_in_units_of_the_bound() -> None:
    right = AskedLinear(module="m", part="p", kernel="", format="", error=0.01, bound=0.02,
                        worst=2.9, output=0)  # fmt: skip
    assert right.is_right
    assert not dataclasses.replace(right, worst=3.1).is_right
    assert not dataclasses.replace(right, error=0.021).is_right


@pytest.mark.parametrize("ends", [torch.OutOfMemoryError, ValueError])
def test_a_step_that_ends_early_matters_unless_memory_ends(
    ends: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory on a GPU is no verdict."""
    subject = loaded_model.Subject(partial(torch.nn.Linear, 2, 2), lambda _model: None, {})
    monkeypatch.setattr(loaded_model, "_finish", Mock(side_effect=ends("in a step")))
    with pytest.raises(ends) if ends is torch.OutOfMemoryError else nullcontext():
        assert loaded_model._matters(subject, ["weight"])


def test_a_whole_model_has_a_config_and_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = Mock(replace=lambda _config, **changes: changes)
    monkeypatch.setitem(sys.modules, "vllm.config.utils", utils)
    monkeypatch.setattr(in_vllm, "shard", lambda config, *_, **named: (config, named))
    config, asked = Mock(), Mock(method="draft_model")
    config.speculative_config = asked
    own, named = in_vllm.beside(config, Path("draft"), device="cuda")
    assert named == {"prefix": "draft_model", "device": "cuda"}
    assert (own["quant_config"], own["model_config"]) == (None, asked.draft_model_config)
    asked.verify_equal_vocab_size_if_draft_model.assert_called_once_with()


METHODS = {
    "eagle3": [("Eagle3LlamaForCausalLM", "fc.weight"), ("Llama", "midlayer.hidden_norm.weight")],
    "eagle": [("EagleLlamaForCausalLM", "norm.weight"), ("B", "fc.weight"), ("A", "model.fc.b")],
    "draft_model": [("LlamaForCausalLM", "layers.0.fc_norm.weight"), ("Llama", "xfc.weight")],
    "mtp": [("Eagle3", f"model.{name}.weight")
            for name in ("mtp.0", "eh_proj", "pre_projection", "layers.9.enorm")],
    "dspark": [("Qwen3DSparkModel", "fc.weight")],
    "dflash": [(f"Qwen3{name}Model", "layers.0.hidden_norm.weight")
               for name in ("DFlash", "LiLiCorr", "XPress", "MuseGlimmer", "Laguna")],
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_the_method_by_which_vllm_serves_a_draft(method: str) -> None:
    for architecture, name in METHODS[method]:
        assert in_vllm.method_of(architecture, ["embed_tokens.weight", name]) == method
