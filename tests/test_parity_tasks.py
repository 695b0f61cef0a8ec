"""Task scores of two servers, from files as lm_eval writes them, and bounds of proportions."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftquant.recipes.errors import OutputError, ParityError, ServerError
from draftquant.scripts.cli import main
from draftquant.validate.counting.paired_change import pooled_mean
from draftquant.validate.parity.finding import ParityFinding
from draftquant.validate.parity.lm_eval_tasks import run_tasks
from draftquant.validate.parity.task_findings import Discordance, mcnemar, task_findings
from draftquant.validate.parity.task_run import TaskRun
from draftquant.validate.parity.task_samples import Directions, TaskSamples, read_samples
from scipy import stats
from vllm_server import VLLMServer

TOLD = ("words_of",)
USUAL: dict[str, Any] = {"confidence": 0.95, "directions": Directions()}
DATE = "2026-11-22T12-01-02.345678"


def sample(i: int, score: object, metric: str = "exact_match", **changes: Any) -> dict[str, Any]:
    """One line, as of lm_eval 0.4.13."""
    return {
        "doc_id": i,
        "doc": {"question": f"q{i}", "answer": "4"},
        "target": "4",
        "arguments": {"gen_args_0": {"arg_0": f"q{i}", "arg_1": {"until": ["\n"]}}},
        "resps": [["4"]],
        "filtered_resps": ["4"],
        "filter": "none",
        "metrics": [metric],
        "doc_hash": f"d{i}",
        "prompt_hash": f"p{i}",
        "target_hash": "t",
        metric: score,
    } | changes


def write(folder: Path, lines: Sequence[object], task: str = "gsm8k", date: str = DATE) -> Path:
    """A run's folder with one task more."""
    model = folder / "some__model"
    model.mkdir(parents=True, exist_ok=True)
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    (model / f"samples_{task}_{date}.jsonl").write_text(text, encoding="utf-8")
    results = {"total_evaluation_time_seconds": folder.name}
    (model / f"results_{date}.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def compare(
    tmp_path: Path, first: Sequence[object], second: Sequence[object], margin: float | None = None
) -> tuple[ParityFinding, ...]:
    a, b = write(tmp_path / "a", first), write(tmp_path / "b", second)
    return task_findings(read_samples(a), read_samples(b), max_score_drop=margin, **USUAL)


def right(count: int, wrong: Sequence[int] = ()) -> list[dict[str, Any]]:
    return [sample(i, 0.0 if i in wrong else 1.0) for i in range(count)]


def test_mcnemar_is_the_sum_over_all_outcomes() -> None:
    """Every way in which b + c fair coins fall, at least as unlikely as this one."""
    for b, c in ((0, 0), (0, 5), (1, 5), (10, 3), (7, 7), (40, 60)):
        masses = stats.binom.pmf(np.arange(b + c + 1), b + c, 0.5)
        expected = masses[masses <= masses[b] * (1 + 1e-9)].sum()
        found = Discordance(num_items=1000, only_first=b, only_second=c)
        assert mcnemar(found) == pytest.approx(expected)


def test_counts_are_weights_and_one_cluster_has_no_spread() -> None:
    sums, counts = np.array([1.0, 6.0, 3.0]), np.array([10.0, 20.0, 30.0])
    found = pooled_mean(sums, counts, confidence=0.9)
    assert found.estimate == pytest.approx(10 / 60)
    pseudo = [3 * 10 / 60 - 2 * x for x in (9 / 50, 4 / 40, 7 / 30)]  # without each
    error = stats.t.ppf(0.9, 60**2 / 1400 - 1) * stats.sem(pseudo)
    assert found.upper - found.estimate == pytest.approx(error)
    one = pooled_mean([3.0], [6.0], confidence=0.95)
    assert (one.lower, one.estimate, one.upper, one.has_spread) == (0.5, 0.5, 0.5, False)
    with pytest.raises(ValueError, match="counts above 0"):
        pooled_mean([1.0, 2.0], [1.0, 0.0], confidence=0.95)


def test_only_discordant_items_count_and_bounds_decide(tmp_path: Path) -> None:
    (found,) = compare(tmp_path, right(400, [0, 1, 2]), right(400, [2, 3]), 0.02)
    assert found.what == "gsm8k exact_match, gain"
    assert found.estimate == pytest.approx(1 / 400)
    assert found.details[0] == {
        "items": 400, "first": pytest.approx(397 / 400), "second": pytest.approx(398 / 400),
        "only_first_right": 1, "only_second_right": 2,
        "mcnemar_p": pytest.approx(stats.binomtest(1, 3).pvalue),
    }  # fmt: skip
    assert (found.verdict, found.threshold) == ("PASS", -0.02)
    for margin, verdict in (
        (None, "INCONCLUSIVE"), (0.005, "FAIL"), (0.05, "PASS"), (0.02, "INCONCLUSIVE"),
    ):  # fmt: skip
        (found,) = compare(tmp_path, right(300), right(300, range(6)), margin)  # 2 % lost
        assert found.verdict == verdict, found.reason
    assert "about 310 items would settle it" in found.reason


def told(tmp_path: Path, name: str, direction: object, metric: str = "err") -> Path:
    """A run in which 30 of 60 items of `b` have a score of 1, with what its results say."""
    lines = [sample(i, float(name == "b" and i < 30), metric) for i in range(60)]
    folder = write(tmp_path / name, lines)
    if direction is not None:
        path = folder / "some__model" / f"results_{DATE}.json"
        text = json.dumps({"higher_is_better": {"gsm8k": {metric: direction}}, "of": name})
        path.write_text(text, encoding="utf-8")
    return folder


LOWER, HIGHER = ["--lower-is-better", "err"], ["--higher-is-better", "err"]


def test_which_way_is_better_is_said_or_known_and_never_guessed(tmp_path: Path) -> None:
    for number, (first, second, options, metric, code) in enumerate((
        (False, None, [], "err", 1), (None, False, [], "err", 1), (None, None, LOWER, "err", 1),
        (None, None, HIGHER, "err", 0), (True, "text", [], "err", 0),
        (None, None, [], "exact_match", 0), (None, None, [], "wer", 1), (None, None, [], "err", 2),
        (False, True, [], "err", 2), (None, True, LOWER, "err", 2),
        (None, None, [*LOWER, *HIGHER], "err", 2),
    )):  # fmt: skip
        place, both = tmp_path / str(number), zip("ab", (first, second), strict=True)
        folders = [str(told(place, name, said, metric)) for name, said in both]
        found = main(["parity", "tasks", *folders, "--max-score-drop", "0.1", *options])
        assert (number, found) == (number, code)


def test_an_item_that_lacks_a_metric_is_refused(tmp_path: Path) -> None:
    """A loss in exact_match was not judged where one item had no such score."""
    both = {"metrics": ["exact_match", "f1"], "f1": 1.0}
    first = [sample(i, 1.0, **both) for i in range(40)]
    second = [sample(i, float(i > 27), **both) for i in range(40)]
    assert [one.verdict for one in compare(tmp_path, first, second, 0.1)] == ["FAIL", "PASS"]
    for spoilt in ({"exact_match": None}, {"metrics": ["f1"]}):
        with pytest.raises(ParityError):
            compare(tmp_path, first, [*second[:17], second[17] | spoilt, *second[18:]], 0.1)


def test_one_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    a, copy = write(tmp_path / "a", right(40)), tmp_path / "copy"
    shutil.copytree(a, copy)
    margin = ["--max-score-drop", "0.5"]
    for other in (a, copy):
        assert main(["parity", "tasks", str(a), str(other), *margin]) == 2
    b = write(tmp_path / "b", right(40))  # answered all alike, in a run of its own
    assert main(["parity", "tasks", str(a), str(b), *margin]) == 0
    next(b.rglob("results_*")).unlink()
    assert main(["parity", "tasks", str(a), str(b), *margin]) == 2


def test_copies_of_an_item_count_once_and_what_is_no_number_does_not(tmp_path: Path) -> None:
    copies = [sample(i, float(i > 1), doc_hash="d", prompt_hash="p", arguments={})
              for i in range(100)]  # fmt: skip
    (found,) = compare(tmp_path, copies, copies, 0.5)
    assert (found.details[0]["items"], found.verdict) == (1, "INCONCLUSIVE")
    assert "expected at least 30 items" in found.reason
    lines = [sample(i, 1.0, metrics=["exact_match", "bleu"], bleu=["a", "b"]) for i in range(40)]
    (found,) = compare(tmp_path, lines, lines, 0.1)
    assert found.what == "gsm8k exact_match, gain"
    bare = [sample(i, ["a", "b"], "bleu") for i in range(40)]
    with pytest.raises(ParityError, match="no metric is one number per item"):
        compare(tmp_path, bare, bare)


Edit = Callable[[list[Any]], Any]

OTHER_ITEMS: tuple[Edit, ...] = (
    lambda x: x[3].update(doc_hash="other"),
    lambda x: x[3].update(prompt_hash="other"),
    lambda x: x[3].update(target_hash="other"),
    lambda x: x[3]["arguments"]["gen_args_0"]["arg_1"].update(max_gen_toks=9),
    lambda x: x.pop(),
    lambda x: [line.update({"filter": "f"}) for line in x],
)
NO_SAMPLES: tuple[Edit, ...] = (
    lambda x: x.append("{"), lambda x: x.append([1]), lambda x: x.append(sample(1, 1.0)),
    lambda x: x[0].update(doc_id=True), lambda x: x[0].update({"filter": None}),
    lambda x: x[0].pop("prompt_hash"), lambda x: x[0].update(metrics="acc"),
    lambda x: x[0].update(exact_match=float("nan")), lambda x: x.clear(),
)  # fmt: skip
"""What is said of each is kept in told/parity_tasks.txt."""


def test_other_items_and_files_that_are_no_samples_are_refused(tmp_path: Path) -> None:
    for edit in OTHER_ITEMS:
        other = right(40)
        edit(other)
        with pytest.raises(ParityError):
            compare(tmp_path, right(40), other)
    for edit in NO_SAMPLES:
        lines: list[Any] = right(3)
        edit(lines)
        with pytest.raises(ParityError):
            read_samples(write(tmp_path / "a", lines))


def test_folders_without_one_run(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("", encoding="utf-8")
    for path in (tmp_path / f"samples_none_{DATE}.jsonl", tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ParityError):
            read_samples(path)
    folder = write(tmp_path / "a", right(3))
    one = next(folder.rglob("*.jsonl"))
    assert list(read_samples(one)) == ["gsm8k"]
    write(folder, right(3), date="2026-11-23T12-01-02.345678")
    with pytest.raises(ParityError):
        read_samples(folder)
    other = write(tmp_path / "b", right(3), task="arc")
    with pytest.raises(ParityError):
        task_findings(read_samples(one), read_samples(other), max_score_drop=None, **USUAL)


# ---- lm_eval is started, told everything, believed nothing: with a script of its words instead


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
    def key(self) -> str | None:
        """Of the server, as its environment had it."""
        key: str | None = json.loads(self._seen.read_text(encoding="utf-8"))[1]
        return key

    def given(self) -> list[str]:
        """Its words, each on a line."""
        words: list[str] = json.loads(self._seen.read_text(encoding="utf-8"))[0]
        return words


@pytest.fixture
def lm_eval(tmp_path: Path) -> LmEval:
    return LmEval(tmp_path)


def asked(running: VLLMServer, **changes: Any) -> TaskRun:
    return replace(TaskRun(running.url, "vllm", ("gsm8k",), "unset", tokenizer=TARGET), **changes)


def ran(run: TaskRun, out: Path, command: str) -> Mapping[str, TaskSamples]:
    return run_tasks(replace(run, out=out, lm_eval=command))


def words_of(lm_eval: LmEval) -> str:
    """Which are kept in told/."""
    return "\n".join(lm_eval.given())


def test_what_lm_eval_is_told(
    running: VLLMServer, lm_eval: LmEval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTQUANT_SERVER_KEY", "secret")
    run = asked(running, limit=3, num_fewshot=2, gen_kwargs="temperature=0.5", seed=7,
                include_path=tmp_path, confirm_run_unsafe_code=True)  # fmt: skip
    out = tmp_path / "out"
    samples = ran(run, out, lm_eval.command)
    assert len(samples["gsm8k"].items["none"]) == 3
    assert samples["gsm8k"].path == out / "the-target" / f"samples_gsm8k_{DATE}.jsonl"
    assert samples["gsm8k"].path.is_file()
    assert not (tmp_path / "out.tasks").exists()
    assert lm_eval.key == "secret"
    assert "secret" not in words_of(lm_eval)
    run = asked(running, server=f"{running.url}/v1/", chat=True, tokenizer=None)
    ran(run, tmp_path / "chat", lm_eval.command)
    words_of(lm_eval)


def test_a_run_that_was_cut_goes_on(running: VLLMServer, lm_eval: LmEval, tmp_path: Path) -> None:
    out, answers = tmp_path / "out", tmp_path / "out.tasks" / "answers_rank0.db"
    lm_eval.told(code=1)
    with pytest.raises(ParityError, match="lm_eval ended with exit code 1"):
        ran(asked(running), out, lm_eval.command)
    assert answers.read_text(encoding="utf-8") == "answers"
    assert not out.exists()
    with pytest.raises(OutputError, match="limit"):
        ran(asked(running, limit=1), out, lm_eval.command)
    lm_eval.told()
    ran(asked(running, concurrency=32), out, lm_eval.command)
    assert out.is_dir()
    assert not answers.exists()


def test_what_is_not_saved_is_missed(running: VLLMServer, lm_eval: LmEval, tmp_path: Path) -> None:
    arc = {"gsm8k": {"effective": 3}, "arc": {"effective": 5}}
    for counts in (None, arc, {"gsm8k": {"effective": 4}}, {"gsm8k": None}):
        lm_eval.told(results={"n-samples": counts} if counts else {})
        with pytest.raises(ParityError):
            ran(asked(running), tmp_path / "out", lm_eval.command)
        assert not (tmp_path / "out").exists()
    lm_eval.told(saves=False)
    with pytest.raises(ParityError, match="it is not there"):
        ran(asked(running), tmp_path / "out", lm_eval.command)


def test_bad_options(running: VLLMServer, tmp_path: Path) -> None:
    for name, value in (
        *(("server", "localhost:8000"), ("tasks", ("",)), ("tokenizer", None)),
        *(("tokenizer", Path("/none")), ("include_path", Path("/none")), ("model", "other")),
        *(("lm_eval", "no-such-lm-eval"), ("lm_eval", ""), ("lm_eval", "'")),
    ):
        run: Any = {"out": tmp_path / "out", "lm_eval": sys.executable} | {name: value}
        with pytest.raises(ParityError):
            run_tasks(asked(running, **run))
    gone = asked(running, server="http://127.0.0.1:9", timeout=1)
    with pytest.raises(ServerError, match="no answer after 3 attempt"):
        ran(gone, tmp_path / "out", sys.executable)


def test_the_command(running: VLLMServer, lm_eval: LmEval, tmp_path: Path) -> None:
    command = ["parity", "run-tasks", "--server", running.url, "--engine", "vllm"]
    command += ["--tokenizer", str(TARGET), "--tasks", "gsm8k", "--out", str(tmp_path / "out")]
    command += ["--lm-eval", lm_eval.command]
    assert main(command) == 0
    assert main([*command, "--out", str(tmp_path / "json"), "--json"]) == 0
    assert main(command) == 2
