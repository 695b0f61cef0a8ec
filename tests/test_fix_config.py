"""Lints on the command line; `--fix-config`: what it writes, records, and what verify accepts."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from draftquant import api as dq
from draftquant.quantize.drafts.config_reader import KEY
from draftquant.quantize.lints.catalogue import fixed_config
from draftquant.quantize.verify import verify
from draftquant.scripts.cli import main
from tiny import edit_json, tiny_eagle3_llama
from verify_cases import reseal

LAYERS = {KEY: [2, 4, 5]}
SIZE = {"draft_vocab_size": 96}
ALL = LAYERS | SIZE
RECIPE = ("--recipe", "int4-channel", "--backend", "torch")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """Two lints that can be fixed, one note."""
    return tiny_eagle3_llama(tmp_path / "draft", config={"draft_vocab_size": None})


def quantize(draft: Path, out: Path, *options: str) -> dict[str, Any]:
    """Run the command and return the config.json that it wrote."""
    assert main(["quantize", str(draft), *RECIPE, "--out", str(out), *options]) == 0
    return dict(json.loads((out / "config.json").read_text(encoding="utf-8")))


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def faults(out: Path, draft: Path, *, foreign: bool = False) -> list[tuple[str, str, str]]:
    found = verify(out, draft, foreign=foreign).faults
    return [(f.where.removeprefix(f"{out}/"), f.expected, f.got) for f in found]


def test_without_the_flag_config_stays_and_lints_are_named(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = quantize(draft, tmp_path / "out")
    del written["quantization_config"]
    assert written == config_of(draft)
    assert "config_changes" not in json.loads(
        (tmp_path / "out" / "draftquant.json").read_text(encoding="utf-8")
    )
    stderr = capsys.readouterr().err
    assert f"lints: aux-layer-ids, draft-vocab-size-missing; see 'draftquant inspect {draft}'" in (
        stderr
    )
    assert "--fix-config corrects aux-layer-ids, draft-vocab-size-missing in the output" in stderr
    with pytest.warns(dq.DraftQuantWarning, match="lints: aux-layer-ids"):
        report = dq.quantize(draft, "int4-channel", tmp_path / "called")
    assert {"aux-layer-ids", "draft-vocab-size-missing"} < {one.name for one in report.lints}
    assert any("fix_config=True corrects" in text for text in report.warnings)
    assert verify(tmp_path / "out", draft).ok


def test_the_flag_fixes_the_output_only_and_says_so(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (draft / "config.json").read_bytes()
    written = quantize(draft, tmp_path / "out", "--fix-config", "--json")
    output = capsys.readouterr()
    del written["quantization_config"]
    assert written == config_of(draft) | ALL
    assert (draft / "config.json").read_bytes() == before
    provenance = json.loads((tmp_path / "out" / "draftquant.json").read_text(encoding="utf-8"))
    assert provenance["config_changes"] == ALL
    assert json.loads(output.out)["config_changes"] == ALL
    assert f"config.json: {KEY} = [2, 4, 5] (aux-layer-ids)" in output.err
    assert "config.json: draft_vocab_size = 96 (draft-vocab-size-missing)" in output.err
    assert "lints:" not in output.err
    assert verify(tmp_path / "out", draft).faults == ()
    assert main(["verify", str(tmp_path / "out"), "--against", str(draft)]) == 0


def no_change(_config: dict[str, Any]) -> None:
    return


BREAKS: dict[str, tuple[Callable[[dict[str, Any]], Any], Any, list[tuple[str, str, str]]]] = {
    "a value of another type": (
        lambda c: c.update(draft_vocab_size=96.0), ALL,
        [("config.json: draft_vocab_size", "96", "96.0")],
    ),
    "a change that no lint asks for": (
        lambda c: c.update(rope_theta=50000.0), ALL,
        [("config.json: rope_theta", "10000.0", "50000.0")],
    ),
    "recorded, not made": (
        lambda c: (c.pop(KEY), c.update(draft_vocab_size=None)), ALL,
        [("config.json: draft_vocab_size", "96", "null"),
         (f"config.json: {KEY}", "[2, 4, 5]", "no such key")],
    ),
    "another one recorded": (
        no_change, {"torch_dtype": "float16"},
        [("config.json: draft_vocab_size", "null", "96"),
         (f"config.json: {KEY}", "no such key", "[2, 4, 5]"),
         ("config.json: torch_dtype", '"float16"', '"bfloat16"')],
    ),
    "made and recorded, of what the draft computes": (
        lambda c: c.update(rms_norm_eps=0.5), ALL | {"rms_norm_eps": 0.5},
        [("config.json: rms_norm_eps", "no change of what the draft computes", "0.5")],
    ),
    "something else recorded": (
        no_change, [7],
        [("draftquant.json", "readable headers and declaration",
          "config_changes: expected an object, got a list")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_verify_accepts_these_changes_and_no_others(name: str, draft: Path, tmp_path: Path) -> None:
    change, recorded, expected = BREAKS[name]
    out = tmp_path / "out"
    config = quantize(draft, out, "--fix-config")
    change(config)
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    edit_json(out / "draftquant.json", config_changes=recorded)
    reseal(out)
    assert faults(out, draft) == expected


def test_quantize_does_not_publish_what_nobody_asked_for(
    draft: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error in what writes the changes: verification puts them in by itself."""

    def damaged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        return fixed_config(config, changes) | {"rms_norm_eps": 0.5}

    monkeypatch.setattr(
        sys.modules["draftquant.quantize.making.quantize_draft"], "fixed_config", damaged
    )
    out = tmp_path / "out"
    assert main(["quantize", str(draft), *RECIPE, "--out", str(out)]) == 1
    assert "config.json: rms_norm_eps: expected 1e-06, got 0.5" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_folder_without_provenance_may_be_fixed(draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(draft, out, "--fix-config")
    (out / "draftquant.json").unlink()
    assert faults(out, draft, foreign=True) == []
    edit_json(out / "config.json", rope_theta=50000.0)
    assert faults(out, draft, foreign=True) == [("config.json: rope_theta", "10000.0", "50000.0")]
