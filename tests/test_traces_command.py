"""`draftquant traces`: its four verbs from the command line, what they print and how they end."""

import json
from pathlib import Path

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.scripts.cli import main
from dumps import Text, make_texts, modelopt
from recorded import record_traces
from test_dumps import PAIR, TARGET


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    out = tmp_path_factory.mktemp("recorded") / "traces"
    prompts = read_prompts(PAIR / "prompts.jsonl")[20:28]
    return record_traces(
        TARGET, prompts, out, max_new_tokens=40, aux_layer_ids=(0, 1, 2), table_ids=(0,)
    )


@pytest.fixture(scope="module")
def texts(recorded: TraceFolder) -> list[Text]:
    return make_texts(TARGET, recorded, torch.float32)


def test_import_says_what_it_found(
    texts: list[Text], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump, out = modelopt(texts, tmp_path / "dump"), tmp_path / "out"
    arguments = ["traces", "import", str(dump), "--from", "modelopt", "--target", str(TARGET)]
    draft = ["--draft", str(PAIR / "draft")]
    assert main([*arguments, "--out", str(out), *draft, "--tables"]) == 0
    said = capsys.readouterr().out
    assert f"{out}: 8 traces of 8 texts, 704 tokens" in said
    assert "layers [0, 1, 2], counted after the layer: recomputed by the target" in said
    assert "last states are those after the last norm: from them, the target's head" in said
    assert TraceFolder.open(out).manifest.tables is not None
    assert main([*arguments, "--out", str(tmp_path / "j"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["out"], found["traces"], found["texts"]) == (str(tmp_path / "j"), 8, 8)
    assert any("recomputed by the target" in sentence for sentence in found["findings"])


def test_split_and_merge(
    recorded: TraceFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [str(tmp_path / "calibration"), str(tmp_path / "gate")]
    arguments = ["traces", "split", str(recorded.folder), "--out", *sides]
    assert main([*arguments, "--fraction", "0.2"]) == 0  # of 8: 1.6
    assert "sum" in capsys.readouterr().out
    assert [len(TraceFolder.open(Path(side))) for side in sides] == [2, 6]
    assert main(["traces", "merge", *sides, "--out", str(tmp_path / "m")]) == 0
    assert "8 traces, 704 tokens" in capsys.readouterr().out
    assert main([*arguments, "--count", "3"]) == 2
    again = ["traces", "merge", sides[0], sides[0], "--out", str(tmp_path / "n")]
    assert main(again) == 2
    assert "the same traces are given twice" in capsys.readouterr().err
    arguments[-2:] = [str(tmp_path / "x"), str(tmp_path / "y")]
    assert main([*arguments, "--fraction", "1.5"]) == 2
    assert "expected a share in (0, 1), got 1.5" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(arguments)
