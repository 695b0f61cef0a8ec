"""The divergence audit on outputs made by hand, and the findings that all checks write."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftquant.recipes.errors import ParityError
from draftquant.scripts.cli import main
from draftquant.scripts.verbs.parity import _show
from draftquant.validate.measure.measurement import Measurement
from draftquant.validate.parity.divergence_findings import LEAST_NOISE, divergence_findings
from draftquant.validate.parity.finding import (
    Findings,
    ParityFinding,
    read_parity,
    to_mapping,
    write_findings,
)
from draftquant.validate.parity.task_samples import read_samples
from handmade_measurements import written
from handmade_runs import SPECULATION, record, run
from scipy import stats
from test_hostile_files import bounded, endless, gigabyte

TEXT = (5, 6, 7, 8)
GAPS = (3.0, 0.1, 0.2, 2.0)


def plain(count: int = 30, **asked: Any) -> Measurement:
    return run([record(i, TEXT, top_gap=GAPS) for i in range(count)], name="plain", **asked)


def speculative(changed: dict[int, Sequence[int]], count: int = 30, **asked: Any) -> Measurement:
    records = [record(i, changed.get(i, TEXT)) for i in range(count)]
    return run(records, name="q", speculation=SPECULATION, **asked)


def again(outputs: Sequence[Sequence[int]], count: int = 30) -> Measurement:
    """A second plain run, in which the first prompts have these outputs."""
    texts = [*outputs, *[TEXT] * (count - len(outputs))]
    return run([record(i, text) for i, text in enumerate(texts)], name="again", concurrency=16)


def test_a_second_plain_run_says_what_noise_is() -> None:
    base = run([record(i, TEXT, top_gap=(3.0, 0.02, 0.15, 0.4)) for i in range(30)], name="plain")
    small, large, few = again([(5, 9)] * 5), again([(5, 6, 7, 9)] * 5), again([(5, 9)] * 4)
    for second, max_gap, verdicts in (
        (None, 0.25, ("PASS", "PASS", "FAIL")),
        (few, 0.25, ("PASS", "PASS", "FAIL")),
        (small, LEAST_NOISE, ("PASS", "FAIL", "FAIL")),  # twice 0.02 is less
        (large, 0.5, ("PASS", "PASS", "PASS")),
    ):
        for position, verdict in enumerate(verdicts, start=1):
            one = speculative({4: (*TEXT[:position], 9)})
            judged = divergence_findings(base, [one], plain_again=second)[0]
            assert judged.verdict == verdict, judged.reason
            assert judged.details[0]["max_gap"] == max_gap
    _, hazard = divergence_findings(base, [speculative({4: (5, 9)})], plain_again=few)
    assert hazard.verdict == "INCONCLUSIVE"
    assert hazard.estimate == pytest.approx((1 / 118) / (4 / 112))
    wild = again([TEXT, TEXT, (9, 9, 9, 9)])
    judged, _ = divergence_findings(plain(), [speculative({})], plain_again=wild)
    assert judged.verdict == "ANOMALOUS"


def test_a_near_tie_explains_no_third_token() -> None:
    own = [record(i, TEXT, top_gap=GAPS, token_logprob=(-0.1, -1.0, -1.0, -0.1)) for i in range(30)]
    for logprob, verdict in ((-1.1, "PASS"), (-1.5, "PASS"), (-1.51, "FAIL"), (-0.4, "FAIL")):
        changed = record(3, (5, 9, 9, 9), token_logprob=(-0.1, logprob, -1.0, -1.0))
        spec = run([*own[:3], changed, *own[4:]], speculation=SPECULATION)
        (found,) = divergence_findings(run(own), [spec])
        assert found.verdict == verdict
        assert found.details[1]["drop"] == pytest.approx(-1.0 - logprob)


def test_hazards_are_compared_exactly() -> None:
    """The bounds are where the tails of the binomial have 5 %."""
    often, none = speculative({i: (5, 9, 9, 9) for i in range(12)}, 60), speculative({}, 60)

    def hazard(one: Measurement, second: Measurement, ratio: float) -> ParityFinding:
        return divergence_findings(plain(60), [one], plain_again=second, max_hazard_ratio=ratio)[1]

    twice, never = again([(5, 9, 9, 9)] * 2, 60), again([], 60)
    found = hazard(often, twice, 1.5)
    ours, theirs = 12 * 2 + 48 * 4, 2 * 2 + 58 * 4
    assert found.estimate == pytest.approx((12 / ours) / (2 / theirs))
    low, high = (x * ours / (x * ours + theirs) for x in (found.lower or 0, found.upper or 0))
    assert stats.binom.sf(11, 14, low) == pytest.approx(0.05)
    assert stats.binom.cdf(12, 14, high) == pytest.approx(0.05)
    verdicts = [found.verdict, hazard(often, twice, 50).verdict, hazard(often, twice, 5).verdict]
    assert verdicts == ["FAIL", "PASS", "INCONCLUSIVE"]
    assert hazard(none, never, 1).verdict == "PASS"
    some = hazard(often, never, 1)
    assert (some.verdict, some.estimate, some.upper) == ("FAIL", None, None)


def test_lossy_acceptance_is_no_parity_and_every_run_is_judged() -> None:
    lossy = replace(SPECULATION, lossy=("rejection_sample_method = fly",))
    one = run(plain().records, speculation=lossy)
    found = divergence_findings(plain(), [speculative({}), speculative({0: (9,)}), one])
    assert [each.verdict for each in found] == ["PASS", "FAIL", "ANOMALOUS"]


def test_runs_that_cannot_be_compared() -> None:
    for first, second, options in (
        (plain(temperature=0.7), speculative({}, temperature=0.7), {}),
        (plain(), speculative({}, temperature=1.0), {}), (plain(30), speculative({}, 29), {}),
        (plain(), speculative({}, version="0.33.0"), {}),
        (plain(), speculative({}, template_sha256="a" * 64), {}),
        (plain(), speculative({}, max_new_tokens=9), {}),
        (run([record(i, TEXT) for i in range(30)]), speculative({}), {}),
        (run([record(i, TEXT, top_gap=(1.0,)) for i in range(30)]), speculative({}), {}),
        (speculative({}), speculative({}), {}), (plain(), plain(), {}),
        (plain(), speculative({}), {"plain_again": speculative({})}),
        (plain(), speculative({}), {"max_gap": float("nan")}),
        (plain(), speculative({}), {"max_hazard_ratio": 2.0}),
        (plain(), speculative({}), {"max_hazard_ratio": 0.0, "plain_again": plain(concurrency=9)}),
        (plain(), speculative({}), {"plain_again": plain()}),
        (plain(), speculative({}), {"min_prompts": 0}),
    ):  # fmt: skip
        with pytest.raises(ParityError):
            divergence_findings(first, [second], **options)
    base = plain(3)  # other prompts under the same hash
    other = run([record(i, TEXT) for i in (0, 1, 5)], speculation=SPECULATION)
    setup = replace(other.setup, asked=base.setup.asked)
    with pytest.raises(ParityError, match="2 prompt"):
        divergence_findings(base, [replace(other, setup=setup)])


FOUND = ParityFinding(
    check="task", what="gsm8k exact_match", estimate=-0.002, lower=-0.006, upper=0.001,
    confidence=0.95, threshold=0.01, verdict="PASS", reason="because",
    details=({"items": 1319, "discordant": [3, 5], "nested": {"p": 0.72}},),
)  # fmt: skip
COUNT = ParityFinding(check="divergence", what="q", estimate=3, threshold=None,
                      verdict="INCONCLUSIVE", reason="no threshold")  # fmt: skip


def test_findings_are_read_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_findings(tmp_path / "f.json", [FOUND, COUNT], drafts_sha256=())
    assert read_parity(tmp_path / "f.json").findings == (FOUND, COUNT)
    _show(Findings(findings=(FOUND,)), None)
    printed = capsys.readouterr().out
    names = [printed.index(name) for name in ("lower bound", "upper bound", "threshold")]
    (row,) = [line for line in printed.splitlines() if "gsm8k" in line and "0.01" in line]
    figures = [row.index(figure) for figure in ("-0.006", " 0.001", " 0.01 ")]
    assert (names, figures) == (sorted(names), sorted(figures))


def test_what_no_check_says_is_refused(tmp_path: Path) -> None:
    path, document = tmp_path / "f.json", json.loads(json.dumps(to_mapping([FOUND])))
    (one,) = document["findings"]
    changed = (
        {"threshold": None}, {"lower": None}, {"upper": None}, {"confidence": 95.0},
        {"verdict": "GOOD"},
    )  # fmt: skip
    documents = [document | {"findings": [one | change]} for change in changed]
    documents += document | {"findings": []}, document | {"format_version": 2}
    for text in ("{", *map(json.dumps, documents)):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ParityError):
            read_parity(path)
    with pytest.raises(ParityError):
        read_parity(tmp_path / "none.json")


@pytest.mark.parametrize("make", [os.mkfifo, endless, gigabyte])
def test_no_file_blocks_or_fills_the_memory(make: Callable[[Path], None], tmp_path: Path) -> None:
    samples = "samples_gsm8k_2026-11-22T12-01-02.345678.jsonl"
    for name, read in (("findings.json", read_parity), (samples, read_samples)):
        make(tmp_path / name)
        with bounded(seconds=20, megabytes=100), pytest.raises(ParityError) as caught:
            read(tmp_path / name)  # type: ignore[operator]
        assert str(tmp_path / name) in caught.value.where


def test_the_command(tmp_path: Path) -> None:
    """One wrong token in 30 prompts; a report is written whatever the verdict."""
    told = {"top_gap": (3.0,) * 8, "token_logprob": (-0.1,) * 8}
    for name, rounds, wrong in (
        ("plain", None, ()), ("right", (7, 0, 0, 0), ()), ("wrong", (7, 0, 0, 0), (7,)),
    ):  # fmt: skip
        texts = [(0, 1, 9, 3, 4, 5, 6, 7) if i in wrong else range(8) for i in range(30)]
        records = [record(i, text, histogram=rounds, **told) for i, text in enumerate(texts)]
        one = run(records, speculation=SPECULATION if rounds else None, num_top_logprobs=2)
        written(tmp_path / name, one)
    command = ["parity", "divergence", str(tmp_path / "plain")]
    right, report = str(tmp_path / "right"), tmp_path / "report.json"
    assert main([*command, right]) == 0
    both = [*command, right, str(tmp_path / "wrong"), "--report"]
    assert main([*both, str(report)]) == 1
    assert report.is_file()
    assert main([*both, str(report)]) == 2
    assert main([*both, str(report), "--overwrite"]) == 1
    assert main([*both, str(tmp_path / "none" / "report.json")]) == 2
    assert main([*command, right, "--min-prompts", "31"]) == 3
