"""lm_eval is started, told everything, believed nothing: with a script of its words instead."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftquant.recipes.errors import OutputError, ParityError, ServerError
from draftquant.scripts.cli import main
from draftquant.validate.parity.lm_eval_tasks import TaskSamples, run_tasks
from draftquant.validate.parity.task_run import TaskRun
from test_parity_tasks import DATE, right
from vllm_server import MODEL, VLLMServer, served

TARGET = Path(__file__).parent / "pairs" / "eagle3-llama" / "target"
SCRIPT = """
import json, os, pathlib, sys
how = json.loads(pathlib.Path(sys.argv[1]).read_text())
given = sys.argv[2:]
pathlib.Path(how["seen"]).write_text(json.dumps([given, os.environ.get("OPENAI_API_KEY")]))
value = lambda option: given[given.index(option) + 1]
pathlib.Path(value("--use_cache") + "_rank0.db").write_text("answers")
out = pathlib.Path(value("--output_path")) / "the-target"
if how["saves"]:
    out.mkdir(parents=True)
    (out / f"results_{how['date']}.json").write_text(json.dumps(how["results"]))
    for task, lines in how["samples"].items():
        text = "".join(json.dumps(line) + "\\n" for line in lines)
        (out / f"samples_{task}_{how['date']}.jsonl").write_text(text)
sys.exit(how["code"])
"""


class LmEval:
    """A script that stands where lm_eval is."""

    def __init__(self, folder: Path) -> None:
        self._script, self._how = folder / "lm_eval.py", folder / "how.json"
        self._seen = folder / "seen.json"
        self._script.write_text(SCRIPT, encoding="utf-8")
        self.command = f"{sys.executable} {self._script} {self._how}"
        self.told()

    def told(self, **changes: Any) -> None:
        how = {
            "seen": str(self._seen),
            "date": DATE,
            "saves": True,
            "code": 0,
            "results": {"n-samples": {"gsm8k": {"original": 9, "effective": 3}}},
            "samples": {"gsm8k": right(3)},
        }
        self._how.write_text(json.dumps(how | changes), encoding="utf-8")

    @property
    def seen(self) -> tuple[list[str], str | None]:
        given, key = json.loads(self._seen.read_text(encoding="utf-8"))
        return given, key


@pytest.fixture
def lm_eval(tmp_path: Path) -> LmEval:
    return LmEval(tmp_path)


@pytest.fixture
def server() -> Iterator[VLLMServer]:
    with served(VLLMServer()) as found:
        yield found


def asked(running: VLLMServer, **changes: Any) -> TaskRun:
    made = TaskRun(running.url, "vllm", ("gsm8k",), "unset", tokenizer=TARGET)
    return replace(made, **changes)


def ran(run: TaskRun, out: Path, command: str) -> Mapping[str, TaskSamples]:
    return run_tasks(replace(run, out=out, lm_eval=command))


def given(options: list[str], name: str) -> str:
    return options[options.index(name) + 1]


def test_what_lm_eval_is_told(
    server: VLLMServer, lm_eval: LmEval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTQUANT_SERVER_KEY", "secret")
    run = asked(server, limit=3, num_fewshot=2, gen_kwargs="temperature=0.5", seed=7,
                include_path=tmp_path, confirm_run_unsafe_code=True)  # fmt: skip
    out = tmp_path / "out"
    samples = ran(run, out, lm_eval.command)
    assert len(samples["gsm8k"].items["none"]) == 3
    assert samples["gsm8k"].path == out / "the-target" / f"samples_gsm8k_{DATE}.jsonl"
    assert samples["gsm8k"].path.is_file()
    assert not (tmp_path / "out.tasks").exists()
    options, key = lm_eval.seen
    assert key == "secret"
    assert "secret" not in " ".join(options)
    assert json.loads(given(options, "--model_args")) == {
        "model": MODEL, "base_url": f"{server.url}/v1/completions", "num_concurrent": 8,
        "max_retries": 5, "timeout": 600, "max_length": 4096, "seed": 7,
        "tokenizer": str(TARGET.absolute()), "tokenizer_backend": "huggingface",
    }  # fmt: skip
    expected = {
        "--model": "local-completions", "--tasks": "gsm8k", "--seed": "7", "--limit": "3",
        "--num_fewshot": "2", "--gen_kwargs": "temperature=0.5", "--include_path": str(tmp_path),
        "--batch_size": "1",
    }  # fmt: skip
    assert {name: given(options, name) for name in expected} == expected
    assert {"--log_samples", "--confirm_run_unsafe_code"} < set(options)
    assert "--apply_chat_template" not in options
    run = asked(server, server=f"{server.url}/v1/", chat=True, tokenizer=None)
    ran(run, tmp_path / "chat", lm_eval.command)
    options, _ = lm_eval.seen
    model = json.loads(given(options, "--model_args"))
    assert model["base_url"] == f"{server.url}/v1/chat/completions"
    assert "tokenizer" not in model
    assert given(options, "--model") == "local-chat-completions"
    assert "--apply_chat_template" in options
    assert "--limit" not in options


def test_a_run_that_was_cut_off_goes_on(
    server: VLLMServer, lm_eval: LmEval, tmp_path: Path
) -> None:
    out, answers = tmp_path / "out", tmp_path / "out.tasks" / "answers_rank0.db"
    lm_eval.told(code=1)
    with pytest.raises(ParityError, match="lm_eval ended with exit code 1"):
        ran(asked(server), out, lm_eval.command)
    assert answers.read_text(encoding="utf-8") == "answers"
    assert not out.exists()
    with pytest.raises(OutputError, match="limit"):
        ran(asked(server, limit=1), out, lm_eval.command)
    lm_eval.told()
    faster = asked(server, concurrency=32)
    ran(faster, out, lm_eval.command)
    assert out.is_dir()
    assert not answers.exists()


def test_what_lm_eval_did_not_save_is_missed(
    server: VLLMServer, lm_eval: LmEval, tmp_path: Path
) -> None:
    for counts, what in (
        (None, "does not say how many items were evaluated"),
        ({"gsm8k": {"effective": 3}, "arc": {"effective": 5}}, "arc has samples of 0 items of 5"),
        ({"gsm8k": {"effective": 4}}, "'none' has samples of 3 items of 4"),
        ({"gsm8k": None}, "of 3 items of None"),
    ):
        lm_eval.told(results={"n-samples": counts} if counts else {})
        with pytest.raises(ParityError, match=what):
            ran(asked(server), tmp_path / "out", lm_eval.command)
        assert not (tmp_path / "out").exists()
    lm_eval.told(saves=False)
    with pytest.raises(ParityError, match="it is not there"):
        ran(asked(server), tmp_path / "out", lm_eval.command)


def test_bad_options(server: VLLMServer, tmp_path: Path) -> None:
    for changes, what in (
        ({"concurrency": 0}, "--concurrency: expected at least 1"),
        ({"num_fewshot": -1}, "--num-fewshot: expected at least 0"),
        ({"server": "localhost:8000"}, "--server: expected an address"),
        ({"tasks": ("",)}, "--tasks: expected names"),
        ({"tokenizer": None}, "--tokenizer: is needed"),
        ({"tokenizer": Path("/none")}, "--tokenizer: /none is no folder"),
        ({"include_path": Path("/none")}, "--include-path: /none is no folder"),
        ({"model": "other"}, "expected a server of other, got one of the-target"),
        ({"lm_eval": "no-such-lm-eval"}, r"pip install 'lm_eval\[api\]==0.4.13'; or"),
        ({"lm_eval": ""}, r"pip install 'lm_eval\[api\]==0.4.13'; or"),
        ({"lm_eval": "'"}, "cannot be read as a command: No closing quotation"),
    ):
        run: Any = {"out": tmp_path / "out", "lm_eval": sys.executable} | changes
        with pytest.raises(ParityError, match=what):
            run_tasks(asked(server, **run))
    gone = asked(server, server="http://127.0.0.1:9", timeout=1)
    with pytest.raises(ServerError, match="no answer after 3 attempt"):
        ran(gone, tmp_path / "out", sys.executable)


def test_the_command(
    server: VLLMServer, lm_eval: LmEval, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["parity", "run-tasks", "--server", server.url, "--engine", "vllm"]
    command += ["--tokenizer", str(TARGET), "--tasks", "gsm8k", "--out", str(tmp_path / "out")]
    command += ["--lm-eval", lm_eval.command]
    assert main(command) == 0
    assert "gsm8k: items 3 (none): " in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gsm8k"]["items"] == {"none": 3}
    assert main(command) == 2
    assert "already exists" in capsys.readouterr().err
