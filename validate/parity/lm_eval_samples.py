"""The samples that lm_eval logs: what was asked of each item, and which score it got.

`--log_samples` writes one JSON lines file per task, `samples_TASK_DATE.jsonl`, in a folder named
after the model; a line is one item under one filter of its answers (`SampleResult` in
lm_eval/result_schema.py:163 of lm_eval 0.4.13). Which way a score is better stands in
`results_DATE.json` beside it, under "higher_is_better", else the command line says it, else the
metric's name where that has one meaning: it is never guessed. Both files are hostile input.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...recipes.brief import Brief
from ...recipes.errors import ParityError, reason, short
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import JsonProblem, parse_json

_FILE = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(\.\d+)?)\.jsonl")
_HASHES = ("doc_hash", "prompt_hash", "target_hash")
_LONGEST_LINE = 16 * 2**20  # bytes: a document, its few-shot prompt and all answers
_MOST_LINES = 2_000_000
_ANEW = "log samples with lm_eval 0.4.3 or later: --log_samples"

Scores = Mapping[str, float]
"""Metric -> score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One document under one filter.

    `sha256` is over its document, prompt, target and how it was to be generated; `scores` are of
    the metrics that are one number.
    """

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
    """Every task of a run, in order: of a folder that lm_eval wrote into, or of one file."""
    files = sorted(path.rglob("samples_*.jsonl")) if path.is_dir() else [path]
    found: dict[str, TaskSamples] = {}
    for file in files:
        named = _FILE.fullmatch(file.name)
        if not file.exists():
            raise ParityError(file, "no such file or folder",
                              fix="give what lm_eval wrote with --log_samples")  # fmt: skip
        if named is None:
            raise ParityError(file, "expected a name such as samples_TASK_DATE.jsonl",
                              fix="give files as lm_eval names them")  # fmt: skip
        task = named["task"]
        if task in found:
            raise ParityError(file, f"is a second run of {task}, beside {found[task].path}",
                              fix="give one of the files instead of the folder")  # fmt: skip
        found[task] = _read_task(file, task, named["date"])
    if not found:
        raise ParityError(path, "holds no samples_TASK_DATE.jsonl", fix=_ANEW)
    return found


def _read_task(path: Path, task: str, date: str) -> TaskSamples:
    items: dict[str, dict[int, Item]] = {}
    digest = hashlib.sha256()
    for number, line in _lines(path):
        digest.update(line)
        where = f"{path}:{number}"
        value = _parsed(line, where)
        name, item = _item(value, where)
        of_filter = items.setdefault(name, {})
        if item.number in of_filter:
            raise ParityError(where, f"document {item.number} stands twice under {short(name)}",
                              fix="give the samples of one run")  # fmt: skip
        of_filter[item.number] = item
    if not items:
        raise ParityError(path, "holds no sample", fix=_ANEW)
    results = _results_beside(path, date)
    return TaskSamples(
        path=path,
        task=task,
        sha256=digest.hexdigest(),
        results_sha256=None if results is None else hashlib.sha256(results.encode()).hexdigest(),
        items=items,
        higher_is_better={} if results is None else _higher_is_better(results, path, task),
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open_stream(path) as stream:
            number = 0
            while line := stream.readline(_LONGEST_LINE + 1):
                number += 1
                if len(line) > _LONGEST_LINE or number > _MOST_LINES:
                    raise ParityError(f"{path}:{number}", "is longer than any file of samples",
                                      fix=_ANEW)  # fmt: skip
                if line.strip():
                    yield number, line
    except OSError as exc:
        raise ParityError(path, f"cannot be read: {reason(exc)}", fix=_ANEW) from exc


def _parsed(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        value = parse_json(line.decode("utf-8"))
    except (UnicodeDecodeError, JsonProblem) as exc:
        raise ParityError(where, f"is not a sample: {exc}", fix=_ANEW) from exc
    if not isinstance(value, Mapping):
        raise ParityError(where, "is not a sample: expected a JSON object", fix=_ANEW)
    return value


def _item(value: Mapping[str, Any], where: str) -> tuple[str, Item]:
    number, metrics, name = (value.get(key) for key in ("doc_id", "metrics", "filter"))
    hashes = [value.get(key) for key in _HASHES]
    if type(number) is not int or not isinstance(name, str):
        raise ParityError(where, "expected a whole number as doc_id, and a filter", fix=_ANEW)
    if not all(isinstance(each, str) and each for each in hashes):
        raise ParityError(where, f"expected {', '.join(_HASHES)}: without them nothing says that"
                          " two runs asked the same", fix=_ANEW)  # fmt: skip
    if not isinstance(metrics, list) or not all(isinstance(each, str) for each in metrics):
        raise ParityError(where, "expected the names of its metrics", fix=_ANEW)
    scores = {}
    for metric in metrics:
        score = value.get(metric)
        if isinstance(score, bool | int | float):
            if not math.isfinite(score):
                raise ParityError(where, f"{short(metric)}: expected a finite score, got {score}",
                                  fix="look into the answers of this item")  # fmt: skip
            scores[metric] = float(score)
    # The prompt's hash is of the text alone; how long and how it is continued stands beside it.
    asked = json.dumps([hashes, value.get("arguments")], sort_keys=True)
    sha256 = hashlib.sha256(asked.encode()).hexdigest()
    return name, Item(number=number, sha256=sha256, scores=scores)


def missing_samples(folder: Path, found: Mapping[str, TaskSamples]) -> str:
    """What a run lacks of the items that it says it evaluated; empty if nothing.

    `results_DATE.json` counts them under "n-samples" (evaluator_utils.py:292 of lm_eval 0.4.13);
    samples that cannot be saved are a warning of lm_eval, no error.
    """
    files = sorted(folder.rglob("results_*.json"))
    if len(files) != 1:
        return f"expected one results_DATE.json, got {len(files)}"
    table = _results(files[0]).get("n-samples")
    if not isinstance(table, Mapping) or not table:
        return f"{files[0].name} does not say how many items were evaluated"
    for task, counts in table.items():
        expected = counts.get("effective") if isinstance(counts, Mapping) else None
        items = found[task].items if task in found else {"": {}}
        for name, of_filter in items.items():
            if len(of_filter) != expected:
                under = f" under {name!r}" if name else ""
                return f"{task}{under} has samples of {len(of_filter)} items of {short(expected)}"
    return ""


def _results_beside(path: Path, date: str) -> str | None:
    results = path.with_name(f"results_{date}.json")
    try:
        return read_text(results) if results.exists() else None
    except OSError as exc:
        raise _unreadable(results, exc) from exc


def _higher_is_better(results: str, path: Path, task: str) -> Mapping[str, bool]:
    try:
        value = parse_json(results)
    except JsonProblem as exc:
        raise _unreadable(path.with_name("results_DATE.json"), exc) from exc
    table = value.get("higher_is_better") if isinstance(value, Mapping) else None
    of_task = table.get(task) if isinstance(table, Mapping) else None
    if not isinstance(of_task, Mapping):
        return {}
    return {str(metric): up for metric, up in of_task.items() if isinstance(up, bool)}


def _results(path: Path) -> Mapping[str, Any]:
    try:
        value = parse_json(read_text(path))
    except (OSError, JsonProblem) as exc:
        raise _unreadable(path, exc) from exc
    return value if isinstance(value, Mapping) else {}


def _unreadable(path: Path, exc: Exception) -> ParityError:
    return ParityError(
        path, f"cannot be read: {reason(exc)}", fix="give the folder as lm_eval wrote it"
    )


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
    """What the command line says of metrics, by name."""

    higher: Collection[str] = ()
    lower: Collection[str] = ()

    def higher_is_better(self, metric: str, first: TaskSamples, second: TaskSamples) -> bool:
        """Whether more is better; ParityError: those who say it differ, or nobody does."""
        told = {
            str(one.path): one.higher_is_better[metric]
            for one in (first, second)
            if metric in one.higher_is_better
        }
        told |= {"--higher-is-better": True} if metric in self.higher else {}
        told |= {"--lower-is-better": False} if metric in self.lower else {}
        if len(set(told.values())) > 1:
            said = ", ".join(f"{who}: {'higher' if up else 'lower'}" for who, up in told.items())
            raise ParityError(
                f"{first.task}, {metric}",
                f"two places disagree on whether higher is better ({said})",
                fix="run both with one version of the task, whose results stand beside the samples",
            )
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
