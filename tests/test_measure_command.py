"""`draftquant measure`: what it prints, records and refuses, and which draft a server runs."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import corpus
import pytest
from draftquant.recipes.errors import MeasureError
from draftquant.scripts.cli import main
from draftquant.validate.measure.measurement import ServerIdentity, Speculation
from draftquant.validate.measure.measurement_file import read_measurement
from draftquant.validate.measure.measuring import DraftIdentity, identified
from draftquant.validate.runs.report_pages import draft_identity
from test_prompts import target  # noqa: F401 - a fixture
from vllm_server import VLLMServer, served

Capsys = pytest.CaptureFixture[str]
LINES = [
    {"id": f"p{i}", "category": "code" if i % 2 else "chat", "token_ids": [i, i + 1]}
    for i in range(6)
]


@pytest.fixture
def running() -> Iterator[VLLMServer]:
    with served(VLLMServer()) as found:
        yield found


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    return path


def measured(running: VLLMServer, prompts: Path, out: str, *options: str) -> int:
    """The exit code."""
    asked = ["--server", running.url, "--engine", "vllm", "--prompts", str(prompts)]
    where = ["--out", str(prompts.with_name(out)), "--attempts", "1", "--max-new-tokens", "12"]
    return main(["measure", *asked, *where, *options])


def test_a_server_that_runs_another_draft_is_refused(
    running: VLLMServer, prompts: Path, capsys: Capsys
) -> None:
    """And of one that is called otherwise both names are kept, shown, and said by the gate."""
    served_draft: dict[str, Any] = {"model": "/mnt/other"}
    running.config = {"vllm_config": {"speculative_config": served_draft}}
    folder = corpus.draft("eagle3-llama")
    draft = ("--draft", str(folder))
    assert measured(running, prompts, "r", *draft) == 2
    said = capsys.readouterr().err
    assert f"expected the draft that the server runs, '/mnt/other', got '{folder.name}'" in said
    assert "--served-as /mnt/other" in said
    assert not [*prompts.parent.glob("r*")]
    assert measured(running, prompts, "r", "--served-as", "/mnt/other") == 2
    assert "--served-as: is another name of --draft" in capsys.readouterr().err
    override = (*draft, "--served-as", "/mnt/other")
    assert measured(running, prompts, "r", *override) == 0
    said = capsys.readouterr().out
    assert f"draft {folder.name}, quantization none; the server calls it /mnt/other" in said
    speculation = read_measurement(prompts.with_name("r")).setup.speculation
    assert speculation is not None
    assert (speculation.served_draft, speculation.told_by) == ("/mnt/other", "user")
    # Of one name and in one place of two machines: what the server tells is all there is.
    running.asked.clear()
    running.status = lambda number: 200 if number < 4 else 0
    assert measured(running, prompts, "s", "--concurrency", "1") == 2
    running.status = lambda _number: 200
    served_draft["model"] = "/drafts/bf16"
    capsys.readouterr()
    assert measured(running, prompts, "s", "--concurrency", "1") == 2
    said = capsys.readouterr().err
    assert "speculation.draft: it was '/mnt/other', now it is '/drafts/bf16'" in said


def test_what_a_user_has_to_know(
    running: VLLMServer, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setenv("DRAFTQUANT_SERVER_KEY", "secret-key")
    running.status = lambda number: 200 if number < 5 else 500
    assert measured(running, prompts, "r", "--concurrency", "1") == 2
    assert "the answers so far are kept" in capsys.readouterr().err
    running.status = lambda number: 500 if number == 9 else 200
    assert measured(running, prompts, "r", "--concurrency", "1", "--attempts", "2") == 0
    said = capsys.readouterr()
    assert "goes on with 3 of 6 requests that are kept" in said.err
    assert "warning: 1 requests were answered at a later attempt" in said.out
    running.status = lambda _: 200
    running.metrics = "none"
    speculation = {"rejection_sample_method": "synthetic"}
    running.config = {"vllm_config": {"speculative_config": speculation}}
    assert measured(running, prompts, "s", "--concurrency", "4") == 0
    said = capsys.readouterr()
    assert "1 request(s) in flight, not 4: only the server's counters tell" in said.err
    assert "does not write: rejection_sample_method = synthetic" in said.out
    assert "does not tell" not in said.out
    assert running.keys == {"Bearer secret-key"}
    assert "secret-key" not in prompts.with_name("r").read_text(encoding="utf-8")


def test_what_is_refused(running: VLLMServer, prompts: Path, capsys: Capsys) -> None:
    for options, problem in (
        (["--concurrency", "0"], "--concurrency: expected at least 1"),
        (["--top-k", "3"], "--top-p and --top-k have no effect"),
        (["--timeout", "nan"], "--timeout: expected more than 0, got nan"),
        (["--max-requests-per-second", "-1"], "--max-requests-per-second: expected more than"),
        (["--server", "localhost"], "--server: expected an address, got 'localhost'"),
        (["--draft", "/nowhere"], "/nowhere"),
        (["--model", "other"], "expected 'other', the server has 'the-target'"),
        (["--prompts", "/nowhere"], "/nowhere: cannot be read"),
        (["--out", "/nowhere/r"], "its parent folder /nowhere does not exist"),
    ):
        assert measured(running, prompts, "r", *options) == 2
        assert problem in capsys.readouterr().err
        assert sorted(prompts.parent.iterdir()) == [prompts]
    given = {"server": "http://x", "engine": "vllm", "prompts": "p", "out": "r"}
    for left_out in given:
        words = [word for name, value in given.items() if name != left_out
                 for word in (f"--{name}", value)]  # fmt: skip
        assert main(["measure", *words]) == 2
        said = capsys.readouterr().err
        assert f"--{left_out}: is needed to measure a server\n  fix: give --{left_out} " in said


SERVER = ServerIdentity(
    engine="vllm",
    version="0.32.0",
    model="the-target",
    arguments={"root": "/models/target", "max_model_len": 4096},
)


@pytest.fixture
def plain() -> Path:
    return corpus.draft("eagle3-llama")


@pytest.fixture
def int4() -> Path:
    return corpus.quantized("eagle3-llama", "int4-channel")


def told(draft: DraftIdentity, named: str | None, quantization: str | None = None) -> Speculation:
    served = Speculation(num_draft_tokens=3, draft=named, draft_quantization=quantization)
    return identified(served, draft, SERVER)


def test_the_same_folder_by_another_path(plain: Path, int4: Path, tmp_path: Path) -> None:
    mounted, copied = tmp_path / "mnt", tmp_path / "other name"
    mounted.symlink_to(int4)
    shutil.copytree(int4, copied)
    for named, how in ((int4, "path"), (mounted, "path"), (copied, "tensors")):
        found = told(draft_identity(str(int4)), str(named), "compressed-tensors")
        assert (found.told_by, found.draft, found.served_draft) == (how, int4.name, str(named))
        assert found.draft_quantization == "int4-channel"
        assert found.served_quantization == "compressed-tensors"
    with pytest.raises(
        MeasureError, match=f"the draft that the server runs, '.*', got '{int4.name}'"
    ):
        told(draft_identity(str(int4)), str(plain))


def test_another_machine_has_the_draft_by_its_name_or_by_what_the_user_says(int4: Path) -> None:
    name = int4.name
    draft = draft_identity(str(int4))
    for named in (f"/elsewhere/{name}", f"a/{name}", f"/c/models--me--{name}/snapshots/1f"):
        assert told(draft, named).told_by == "name"
    for named in ("/elsewhere/bf16", f"someone/{name}-gptq", f"{name}/bf16", "/" + "x" * 5000):
        with pytest.raises(MeasureError, match="--served-as") as caught:
            told(draft, named)
        assert caught.value.where == "--draft"
    of_the_hub = replace(draft, draft="someone/a-draft", folder=Path("/c/models--b--x/snapshots/1"))
    assert told(of_the_hub, "/d/models--someone--a-draft/snapshots/2").told_by == "name"
    draft = draft_identity(str(int4), served_as="/draft")
    found = told(draft, "/draft")
    assert (found.told_by, found.served_draft, found.draft) == ("user", "/draft", name)
    for other, shown in (("/draft2", "'/draft2', got"), (None, "None")):
        with pytest.raises(MeasureError, match=f"what the server calls its draft, {shown}"):
            told(draft, other)
