"""What the measurements of `served_pair` say: beside replay, by the gate, by parity, in seconds."""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.scripts.dev.docs.drawing import BLUE, FAINT, figure, house_look, svg
from draftquant.validate.counting.acceptance_counts import pooled
from draftquant.validate.measure.measurement_file import read_measurement
from judging import figures, run, write_rows
from served.beside_replay import FP8, beside_replay
from served.results import Served
from served_pair import (
    BF16,
    FEW,
    FP8_CACHE,
    HERE,
    NUM_DRAFT_TOKENS,
    PAIR,
    PASSES,
    PLAIN,
    SERVERS,
    answers,
    draft,
    sums,
)
from stages import Work

from benchmarks.quality import JUDGED

TIMED = ("one", "eight")


def judge(work: Work) -> None:
    """Write served.json and served.svg, of the measurements that exist."""
    (work / "served/reports").mkdir(exist_ok=True)
    measured = [name for name in SERVERS[1:] if answers(work, "greedy", name).exists()]
    rows = [{"question": "acceptance", **_acceptance(work, n), **_drawn(work, n)} for n in measured]
    rows += [{"question": "speed", **row} for n in ("one", "eight") for row in _speed(work, n)]
    rows += [{"question": "parity", **row} for row in _parity(work, measured)]
    write_rows(HERE / "served.json", rows)
    (HERE / "served.svg").write_text(_picture(rows), encoding="utf-8")


@house_look()
def _picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per CPU second beside the acceptance length; without a draft that is 1."""
    lengths = {r["draft"]: r["acceptance_length"] for r in rows if r["question"] == "acceptance"}
    made, axes = figure(9, 3.4, len(TIMED), layout="constrained")
    for axis, name in zip(axes, TIMED, strict=True):
        requests = PASSES[name].concurrency
        axis.set_title(f"{requests} at a time", loc="left")
        axis.set_xlabel("tokens per verify step")
        for row in rows:
            if row["question"] != "speed" or row["requests"] != requests:
                continue
            x, y = lengths.get(row["draft"], 1.0), row["tokens_per_second"]
            axis.plot(x, y, "o", color=FAINT if row["draft"] == PLAIN else BLUE)
            ends = (
                {"xytext": (-8, -4), "ha": "right"} if x > 1 else {"xytext": (8, -4), "ha": "left"}
            )
            axis.annotate(row["draft"], (x, y), textcoords="offset points", **ends)
        axis.set(xlim=(0.9, 2.4), ylim=(0, None))
        axis.grid(axis="y", linewidth=0.6)
    axes[0].set_ylabel("tokens per CPU second")
    return svg(made, "Tokens per CPU second beside the acceptance length")


def _acceptance(work: Work, name: str) -> dict[str, Any]:
    """The engine's counts beside replay's, and both gates; kept for a further run."""
    kept = work / f"served/reports/{name}.json"
    if kept.exists():
        row: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return row
    measurement = read_measurement(answers(work, "greedy", name))
    folder, traces = draft(work, name), work / "served/prompts"
    texts = [record.token_ids for record in measurement.records]
    accepted = [record.accepted or () for record in measurement.records]
    own = folder, TraceFolder.open(traces), texts, accepted
    found = beside_replay(*own, NUM_DRAFT_TOKENS, FP8 if name == FP8_CACHE else None)
    version = measurement.setup.server.version
    row = dataclasses.asdict(Served.of(found, family="smollm2", draft=name, version=version))
    both = (answers(work, "greedy", BF16), answers(work, "greedy", name))
    asked = {
        "measured": ("--measured", *both),
        "traces": ("--traces", traces, "--dtype", "bfloat16", "-k", NUM_DRAFT_TOKENS),
    }
    for how, options in asked.items() if name != BF16 else ():
        report = work / f"served/reports/{name}.{how}.json"
        if not report.exists():
            run("gate", PAIR / "draft", folder, *options, "--report", report, judged=JUDGED)
        row[how] = figures(report)
    kept.write_text(json.dumps(row), encoding="utf-8")
    return row


def _drawn(work: Work, name: str) -> dict[str, float]:
    """Its acceptance length at the temperature, where it was measured."""
    drawn = answers(work, "sampled", name)
    if not drawn.exists():
        return {}
    records = read_measurement(drawn).records
    counts = pooled((r.counts for r in records if r.counts), NUM_DRAFT_TOKENS)
    return {"sampled": counts.mean_acceptance_length}


def _speed(work: Work, name: str) -> Iterator[dict[str, Any]]:
    """Tokens per CPU second, and the ratios of equal blocks of prompts."""
    numbers = PASSES[name].blocks
    taken = {server: [answers(work, name, server, i) for i in numbers] for server in FEW}
    alike = zip(*taken.values(), strict=True)
    blocks = [all(one.with_suffix(".seconds").exists() for one in same) for same in alike]
    speeds = {server: [*map(_rate, compress(own, blocks))] for server, own in taken.items()}
    for server, own in speeds.items():
        yield {
            "requests": PASSES[name].concurrency,
            "draft": server,
            "tokens_per_second": round(statistics.median(own), 1),
            "blocks": len(own),
            "over_plain": _ratio(own, speeds[PLAIN]),
            "over_bf16": _ratio(own, speeds[BF16]),
        }


def _rate(answered: Path) -> float:
    tokens = sum(len(record.token_ids) for record in read_measurement(answered).records)
    return tokens / float(answered.with_suffix(".seconds").read_text(encoding="utf-8"))


def _ratio(these: list[float], others: list[float]) -> list[float]:
    """The median ratio of pairs, the smallest and the largest."""
    ratios = [a / b for a, b in zip(these, others, strict=True)]
    return [round(x, 3) for x in (statistics.median(ratios), min(ratios), max(ratios))]


def _parity(work: Work, measured: list[str]) -> Iterator[Mapping[str, Any]]:
    greedy = {name: answers(work, "greedy", name) for name in (PLAIN, *measured)}
    again = answers(work, "again", PLAIN)
    prompts = answers(work, "sampled", PLAIN).with_suffix(".prompts")
    for name in measured:
        noise = ("--plain-again", again, "--max-hazard-ratio", 2)
        yield from _found(work, name, "divergence", greedy[PLAIN], greedy[name], *noise)
    for name in FEW[1:]:
        summed = [sums(work, each) for each in (PLAIN, name)]
        if all(each.exists() for each in summed):
            yield from _found(work, name, "tasks", *summed, "--max-score-drop", 0.03)
        drawn = [answers(work, "sampled", each) for each in (PLAIN, name)]
        if all(each.exists() for each in drawn):
            scored = ("--prompts", prompts, "--target", work.target, "--max-logprob-drop", 0.1)
            yield from _found(work, name, "sampled", *drawn, *scored)


def _found(work: Work, name: str, check: str, *words: object) -> Iterator[Mapping[str, Any]]:
    """The findings of a check of `parity`."""
    report: Path = work / f"served/reports/{name}.{check}.json"
    if not report.exists():
        run("parity", check, *words, "--report", report, judged=JUDGED)
    for finding in json.loads(report.read_text(encoding="utf-8"))["findings"]:
        kept = ("check", "what", "estimate", "lower", "upper", "threshold", "verdict", "reason")
        yield {"draft": name, **{key: finding[key] for key in kept}}
