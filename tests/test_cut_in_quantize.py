"""`quantize --vocab-size`: rows chosen, cut and quantized in one command, as by two."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cuts import target
from draftquant import api as dq
from draftquant.quantize.files import staging
from draftquant.quantize.files.staging import find_staging
from draftquant.recipes.errors import DraftQuantError, GateError, OutputError
from draftquant.scripts.cli import main
from said_traces import write_said
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    tiny_eagle3_llama(folder / "draft")
    write_said(folder / "traces", prompts=12)
    write_said(folder / "others", prompts=12, seed=1)
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> tuple[str, str]:
    assert main([str(word) for word in words]) == code
    return capsys.readouterr()


def same(one: Path, two: Path) -> None:
    """Every byte, but for the command line in the record."""
    files = sorted(path.name for path in one.iterdir())
    assert files == sorted(path.name for path in two.iterdir())
    for name in files:
        if name != "draftquant.json":
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
    records = [json.loads((each / "draftquant.json").read_text()) for each in (one, two)]
    for record in records:
        del record["argv"], record["sha256"]  # which is over the command line too
    assert records[0] == records[1]


@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["int4-channel-gptq-head", "fp8-ptpc-head"])
def test_one_command_gives_what_two_give(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    draft, traces, one = folder / "draft", folder / "traces", tmp_path / "one"
    given = ("--traces", traces) if "gptq" in recipe else ()
    run(capsys, "vocab", draft, "--traces", traces, "--size", SIZE, "--out", tmp_path / "cut")
    run(capsys, "quantize", tmp_path / "cut", "--recipe", recipe, *given, "--out", tmp_path / "two")
    asked = ("--recipe", recipe, "--traces", traces, "--vocab-size", SIZE, "--out", one)
    _, said = run(capsys, "quantize", draft, *asked)
    assert ("--traces chose the rows, and is not used otherwise" in said) == (not given)
    same(one, tmp_path / "two")
    assert not find_staging(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "one", "two"]
    for verb in (("verify", one, "--against", draft), ("inspect", one),
                 ("plan", tmp_path / "cut", "--recipe", recipe)):  # fmt: skip
        run(capsys, *verb)
    with pytest.raises(GateError):
        dq.gate(draft, one, traces=traces)
    dq.gate(draft, one, traces=folder / "others", num_draft_tokens=3)


def test_a_recipe_that_does_not_fit_and_a_full_disk_come_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"traces": folder / "traces", "vocab_size": SIZE}
    with monkeypatch.context() as patch:
        patch.setattr(staging.Path, "mkdir", lambda *_, **__: pytest.fail("something is written"))
        with pytest.raises(DraftQuantError):
            dq.quantize(folder / "draft", "int4-group128", tmp_path / "out", **arguments)
        tensors = sum(path.stat().st_size for path in (folder / "draft").glob("*.safetensors"))
        free = shutil.disk_usage(tmp_path)._replace(free=(32 << 20) + tensors)
        patch.setattr(staging.shutil, "disk_usage", lambda _path: free)
        with pytest.raises(OutputError):
            dq.quantize(folder / "draft", "fp8-ptpc", tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


def test_what_no_choice_can_mend_is_warned(folder: Path, tmp_path: Path) -> None:
    """Of a draft whose head was cut before."""
    draft = tiny_eagle3_llama(tmp_path / "draft", pruned_vocabulary=True)
    arguments: dict[str, Any] = {"traces": folder / "traces", "vocab_size": SIZE}
    with pytest.warns(dq.DraftQuantWarning, match="have no row in the draft, which has 48"):
        dq.quantize(draft, "fp8-ptpc", tmp_path / "out", **arguments)


def test_with_the_targets_head(folder: Path, tmp_path: Path) -> None:
    draft, model = tiny_dflash(tmp_path / "dflash"), target(tmp_path / "target")
    asked: dict[str, Any] = {"target": model, "out": tmp_path / "out"}
    cut = dq.vocab(draft, folder / "traces", size=SIZE, target=model, out=tmp_path / "cut").cut
    (one,) = dq.quantize(draft, "fp8-ptpc", traces=folder / "traces", vocab_size=SIZE, **asked).cuts
    assert cut is not None
    assert one.head_from is not None
    assert (one.size, one.head_from.tensor) == (cut.size, "model.lm_head.weight")
