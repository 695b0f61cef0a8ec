"""What lm_eval logged of its tasks: each item's question and score, and which scores are better.

A line of `samples_TASK_DATE.jsonl` is one item under one filter of its answers (`SampleResult` in
lm_eval/result_schema.py:163 of lm_eval 0.4.13).
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...recipes.brief import Brief
from ...recipes.errors import ParityError, short
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import JsonProblem, parse_json, reading
from ..measure.server_answers import section

_FILE = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(\.\d+)?)\.jsonl")
_HASHES = ("doc_hash", "prompt_hash", "target_hash")
_LONGEST_LINE = 16 * 2**20  # bytes: a document, its few-shot prompt and all answers
_MOST_LINES = 2_000_000
_ANEW = "log samples with lm_eval 0.4.3 or later: --log_samples"

Scores = Mapping[str, float]
"""Metric -> score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One document under one filter, with the hash of what was asked, and its scores."""

    number: int
    sha256: str
    scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TaskSamples(Brief):
    """The samples of one task of one lm_eval run.

    Attributes:
        path: the file.
        task: the task's name.
        sha256: hash of the file's bytes.
        results_sha256: hash of the results file beside it; None where there is none.
        items: filter -> number of an item -> the item.
        higher_is_better: metric -> whether a higher value is better, as the results file declares.
    """

    path: Path
    task: str
    sha256: str
    results_sha256: str | None
    items: Mapping[str, Mapping[int, Item]]
    higher_is_better: Mapping[str, bool]

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "task": self.task,
            "file": self.path,
            "items": ", ".join(f"{len(each)} ({name})" for name, each in self.items.items()),
        }


def read_samples(path: Path) -> dict[str, TaskSamples]:
    """Every task of a run, in order: from a folder that lm_eval wrote, or from one file."""
    files = sorted(path.rglob("samples_*.jsonl")) if path.is_dir() else [path]
    tasks: dict[str, TaskSamples] = {}
    for file in files:
        named = _FILE.fullmatch(file.name)
        if not file.exists():
            raise ParityError(
                file,
                "no such file or folder",
                fix="give what lm_eval wrote with --log_samples",
            )
        if named is None:
            raise ParityError(
                file,
                "expected a name such as samples_TASK_DATE.jsonl",
                fix="give files as lm_eval names them",
            )
        task = named["task"]
        if task in tasks:
            raise ParityError(file, f"is a second run of {task}, beside {tasks[task].path}",
                              fix="give one of the files instead of the folder")  # fmt: skip
        tasks[task] = _read_task(file, task, named["date"])
    if not tasks:
        raise ParityError(path, "holds no samples_TASK_DATE.jsonl", fix=_ANEW)
    return tasks


def _read_task(path: Path, task: str, date: str) -> TaskSamples:
    items: dict[str, dict[int, Item]] = {}
    digest = hashlib.sha256()
    for where, line in _lines(path):
        digest.update(line)
        name, item = _item(line, where)
        of_filter = items.setdefault(name, {})
        if item.number in of_filter:
            raise ParityError(where, f"document {item.number} stands twice under {short(name)}",
                              fix="give the samples of one run")  # fmt: skip
        of_filter[item.number] = item
    if not items:
        raise ParityError(path, "holds no sample", fix=_ANEW)
    results = path.with_name(f"results_{date}.json")
    text, content = _results(results) if results.exists() else (None, {})
    told = section(content, "higher_is_better", task)
    return TaskSamples(
        path=path,
        task=task,
        sha256=digest.hexdigest(),
        results_sha256=None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        items=items,
        higher_is_better={name: up for name, up in told.items() if isinstance(up, bool)},
    )


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    with reading(path, ParityError, _ANEW), open_stream(path) as stream:
        lines = iter(lambda: stream.readline(_LONGEST_LINE + 1), b"")
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            if len(line) > _LONGEST_LINE or number > _MOST_LINES:
                raise ParityError(where, "is longer than any file of samples", fix=_ANEW)
            if line.strip():
                yield where, line


def _item(line: bytes, where: str) -> tuple[str, Item]:
    try:
        value = parse_json(line.decode("utf-8"))
        if not isinstance(value, Mapping):
            raise JsonProblem("expected a JSON object")
    except (UnicodeDecodeError, JsonProblem) as exc:
        raise ParityError(where, f"is not a sample: {exc}", fix=_ANEW) from exc
    get: Callable[[str], Any] = value.get
    number, metrics, name = get("doc_id"), get("metrics"), get("filter")
    hashes = list(map(get, _HASHES))
    for fits, expected in (
        (type(number) is int and isinstance(name, str), "a whole number as doc_id, and a filter"),
        (all(isinstance(each, str) and each for each in hashes), f"{', '.join(_HASHES)}: without"
         " them nothing says that two runs asked the same"),
        (isinstance(metrics, list) and all(isinstance(each, str) for each in metrics),
         "the names of its metrics"),
    ):  # fmt: skip
        if not fits:
            raise ParityError(where, f"expected {expected}", fix=_ANEW)
    scores = {}
    for metric in metrics or ():  # a list, as was checked
        score = get(metric)
        if isinstance(score, bool | int | float):
            if not math.isfinite(score):
                raise ParityError(where, f"{short(metric)}: expected a finite score, got {score}",
                                  fix="look into the answers of this item")  # fmt: skip
            scores[metric] = float(score)
    # The prompt's hash covers only the text; length and settings of the answer are beside it.
    asked = json.dumps([hashes, get("arguments")], sort_keys=True)
    sha256 = hashlib.sha256(asked.encode()).hexdigest()
    return name, Item(number=number, sha256=sha256, scores=scores)


def missing_samples(folder: Path, tasks: Mapping[str, TaskSamples]) -> str:
    """Items that a run claims to have evaluated and lacks; empty if none."""
    files = sorted(folder.rglob("results_*.json"))
    if len(files) != 1:
        return f"expected one results_DATE.json, got {len(files)}"
    table = _results(files[0])[1].get("n-samples")  # evaluator_utils.py:292 of lm_eval 0.4.13
    if not isinstance(table, Mapping) or not table:
        return f"{files[0].name} does not say how many items were evaluated"
    for task, counts in table.items():
        expected = counts.get("effective") if isinstance(counts, Mapping) else None
        items = tasks[task].items if task in tasks else {"": {}}
        for name, of_filter in items.items():
            if len(of_filter) != expected:
                under = f" under {name!r}" if name else ""
                return f"{task}{under} has samples of {len(of_filter)} items of {short(expected)}"
    return ""


def _results(path: Path) -> tuple[str, Mapping[str, Any]]:
    with reading(path, ParityError, "give the folder as lm_eval wrote it", "cannot be read: "):
        text = read_text(path)
        value = parse_json(text)
    return text, value if isinstance(value, Mapping) else {}


_HIGHER = frozenset((
    "acc", "acc_norm", "acc_mutual_info", "acc_bytes", "acc_all", "exact_match", "em", "f1", "mcc",
    "bleu", "chrf", "rouge1", "rouge2", "rougeL", "pass@1", "likelihood",
))  # fmt: skip
_LOWER = frozenset((
    "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "ppl", "brier_score",
    "mae", "mse", "wer", "cer",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Directions:
    """Directions of metrics from the command line, by name."""

    higher: Collection[str] = ()
    lower: Collection[str] = ()

    def higher_is_better(self, metric: str, first: TaskSamples, second: TaskSamples) -> bool:
        """Whether more is better; ParityError if the sources disagree, or nobody says."""
        told = {
            str(side.path): side.higher_is_better[metric]
            for side in (first, second)
            if metric in side.higher_is_better
        }
        told |= {"--higher-is-better": True} if metric in self.higher else {}
        told |= {"--lower-is-better": False} if metric in self.lower else {}
        if len(set(told.values())) > 1:
            claims = ", ".join(f"{who}: {'higher' if up else 'lower'}" for who, up in told.items())
            what = f"two places disagree on whether higher is better ({claims})"
            fix = "run both with one version of the task, whose results stand beside the samples"
            raise ParityError(f"{first.task}, {metric}", what, fix=fix)
        if told:
            return next(iter(told.values()))
        if metric in _HIGHER | _LOWER:
            return metric in _HIGHER
        raise ParityError(
            f"{first.task}, {metric}",
            "it is not recorded whether a higher or a lower score is better: expected"
            " results_DATE.json beside the samples of one side",
            fix=f"--higher-is-better {metric}, or --lower-is-better {metric}",
        )
