"""Speed of servers, from measurements made by hand."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from draftquant.validate.errors import MeasureError
from draftquant.validate.launch.speed import Run, SpeedReport, speed_report
from draftquant.validate.launch.speed_plot import draw_speed
from draftquant.validate.measure.measurement import (
    Asked,
    Measurement,
    RequestRecord,
    ServerIdentity,
    Setup,
    Speculation,
)

SPECULATION = Speculation(num_draft_tokens=2)


def record(i: int, tokens: int, first: float | None, latency: float, began: float = 0,
           histogram: tuple[int, ...] | None = None) -> RequestRecord:  # fmt: skip
    return RequestRecord(
        id=f"p{i}",
        category="",
        prompt_sha256=f"{i:064}",
        num_prompt_tokens=1,
        token_ids=(7,) * tokens,
        ended="length",
        histogram=histogram,
        began=began,
        time_to_first_token=first,
        latency=latency,
    )


def run(
    variant: str, concurrency: int, repeat: int, records: Sequence[RequestRecord]
) -> Run:  # fmt: skip
    drafts = records[0].histogram is not None
    setup = Setup(
        server=ServerIdentity(engine="vllm", version="0.32", model="m"),
        speculation=SPECULATION if drafts else None,
        asked=Asked(prompts_sha256="0" * 64, max_new_tokens=64, concurrency=concurrency),
        draftquant="0",
    )
    name = f"{variant}.c{concurrency}.r{repeat}.jsonl"
    return Run(
        variant=variant,
        drafts=drafts,
        concurrency=concurrency,
        repeat=repeat,
        measurement=Measurement(name=name, setup=setup, records=tuple(records)),
    )


def matrix(
    repeats: int = 2, num_prompts: int = 4, concurrencies: tuple[int, ...] = (1,)
) -> list[Run]:
    """Prompt i takes i + 1 seconds per 10 tokens undrafted, half that in BF16, 40 % quantized."""
    found = []
    for repeat in range(1, repeats + 1):
        for variant, share in (("none", 1.0), ("bf16", 0.5), ("int4", 0.4)):
            for concurrency in concurrencies:
                slow = share * (1 + 0.01 * repeat)  # of all variants alike
                drafted = None if variant == "none" else (2, 1, 2)
                records = [
                    record(i, 11, 0.1 * slow, (i + 1) * slow, began=3.0 * i, histogram=drafted)
                    for i in range(num_prompts)
                ]
                found.append(run(variant, concurrency, repeat, records))
    return found


def report_of(runs: Sequence[Run]) -> SpeedReport:
    return speed_report(runs)


def test_figures_by_hand() -> None:
    report = report_of(matrix())
    none, bf16, int4 = report.figures
    assert (report.undrafted, report.baseline, report.num_prompts) == ("none", "bf16", 4)
    assert report.engine == "vllm 0.32"
    assert (none.num_requests, none.num_tokens, none.repeats) == (8, 88, 2)
    assert none.tokens_per_second.value == pytest.approx(88 / (10 * 1.01 + 10 * 1.02))
    # From 0 to the end of the last, which begins after 9 seconds.
    assert none.whole_run_tokens_per_second == pytest.approx(88 / (9 + 4.04 + 9 + 4.08))
    assert none.time_per_output_token is not None
    assert none.time_per_output_token.value == pytest.approx((10 - 0.4) * 2.03 / 80)
    assert none.time_to_first_token is not None
    assert none.time_to_first_token.median == pytest.approx(0.1015)
    assert (none.speed_up, none.against_baseline, none.acceptance_length) == (None, None, None)
    assert bf16.speed_up is not None
    assert bf16.against_baseline is None
    assert bf16.acceptance_length is not None
    assert bf16.acceptance_length.value == pytest.approx((2 + 1 * 2 + 2 * 3) / 5)
    assert int4.against_baseline is not None
    # Every prompt and repeat is slower by the same factor: ratios have no width.
    for found, value in ((bf16.speed_up, 2.0), (int4.against_baseline, 1.25)):
        assert (found.value, found.lower, found.upper) == pytest.approx((value,) * 3)
    assert none.tokens_per_second.lower is not None
    assert none.tokens_per_second.lower < none.tokens_per_second.value  # prompts differ


def test_speed_is_a_ratio_of_sums_and_never_a_mean_of_ratios() -> None:
    runs = [
        run("none", 1, r, [record(0, 10, None, 10.0), record(1, 90, None, 10.0)]) for r in (1, 2)
    ] + [
        run("bf16", 1, r, [record(i, n, None, s, histogram=(n, 0, 0))
                           for i, (n, s) in enumerate(((10, 5.0), (90, 10.0)))]) for r in (1, 2)
    ]  # fmt: skip
    bf16 = report_of(runs).figures[1]
    assert bf16.speed_up is not None
    assert bf16.speed_up.value == pytest.approx(20 / 15)  # of 2 and 1 the mean is 1.5
    assert bf16.time_per_output_token is bf16.time_to_first_token is None  # answers came whole


def test_in_flight_there_are_as_many_as_there_are_prompts() -> None:
    report = report_of(matrix(concurrencies=(2, 8)))
    two, eight = report.of("none", 2), report.of("none", 8)
    assert eight.tokens_per_second.value == pytest.approx(2 * two.tokens_per_second.value)
    assert report.concurrencies == (2, 8)
    assert report.variants == ("none", "bf16", "int4")


def test_copies_of_a_prompt_are_one() -> None:
    runs = matrix()
    copied = [
        dataclasses.replace(
            one,
            measurement=dataclasses.replace(
                one.measurement,
                records=(
                    *one.measurement.records,
                    dataclasses.replace(one.measurement.records[0], id="copy"),
                ),
            ),
        )
        for one in runs
    ]
    report = report_of(copied)
    assert report.num_prompts == 4
    assert report.figures[0].num_requests == 10


def test_warnings() -> None:
    report = report_of(matrix(repeats=1, concurrencies=(1, 2)))
    assert report.figures[1].speed_up is not None
    assert report.figures[1].speed_up.lower is None
    assert [warning.split(":")[0] for warning in report.warnings] == [
        "one repeat does not show how much a server's speed varies, so there are no intervals"
        " (repeats",
        "4 prompts are few at concurrency 2",
    ]
    assert report_of(matrix()).warnings[0].startswith("with two repeats, intervals are three")
    runs = matrix(repeats=3)
    one = runs[1].measurement
    lossy = dataclasses.replace(SPECULATION, num_draft_tokens=3, lossy=("method = fly",))
    again = dataclasses.replace(one.records[0], num_attempts=2)
    runs[1] = dataclasses.replace(
        runs[1],
        measurement=dataclasses.replace(
            one,
            setup=dataclasses.replace(one.setup, speculation=lossy),
            records=(again, *one.records[1:]),
        ),
    )
    for i in (4, 7):
        alike = dataclasses.replace(runs[i].measurement, setup=runs[1].measurement.setup)
        runs[i] = dataclasses.replace(runs[i], measurement=alike)
    assert report_of(runs).warnings == (
        "1 request(s) were asked more than once: the servers were overloaded",
        "bf16 has a lossy acceptance rule: method = fly",
        "the variants draft different numbers of tokens: bf16 3, int4 2",
    )


def test_measurements_that_do_not_belong_together_are_refused() -> None:
    def with_measurement(**changes: object) -> list[Run]:
        runs = matrix()
        changed = dataclasses.replace(runs[1].measurement, **changes)  # type: ignore[arg-type]
        return [runs[0], dataclasses.replace(runs[1], measurement=changed), *runs[2:]]

    setup, records = matrix()[1].measurement.setup, matrix()[1].measurement.records
    server = dataclasses.replace(setup.server, version="0.33")
    with pytest.raises(MeasureError, match=r"was not measured as none\.c1\.r1") as caught:
        report_of(with_measurement(setup=dataclasses.replace(setup, server=server)))
    assert caught.value.details == ("  engine version: 0.32, 0.33",)
    with pytest.raises(MeasureError, match="of variant bf16 drafts nothing"):
        report_of(with_measurement(setup=dataclasses.replace(setup, speculation=None)))
    with pytest.raises(MeasureError, match=r"has other prompts than none\.c1\.r1"):
        report_of(with_measurement(records=records[::-1]))
    asked = dataclasses.replace(setup.asked, concurrency=2)
    with pytest.raises(MeasureError, match=r"has 2 request\(s\) in flight, and not 1"):
        report_of(with_measurement(setup=dataclasses.replace(setup, asked=asked)))
    no_time = dataclasses.replace(records[0], latency=0.0)
    with pytest.raises(MeasureError, match="prompt 'p0': expected a latency above 0 seconds"):
        report_of(with_measurement(records=(no_time, *records[1:])))
    runs = matrix()
    with pytest.raises(MeasureError, match="of variant none drafts, and the matrix says otherwise"):
        report_of([dataclasses.replace(r, drafts=True) if r.variant == "bf16" else
                   dataclasses.replace(r, measurement=dataclasses.replace(
                       r.measurement, setup=setup)) for r in runs])  # fmt: skip


@pytest.mark.parametrize("undrafted", [True, False])
def test_a_drawing_is_the_same_each_time(undrafted: bool, tmp_path: Path) -> None:
    runs = [r for r in matrix(concurrencies=(1, 2, 8)) if undrafted or r.drafts]
    for name in ("a.svg", "b.svg"):
        draw_speed(report_of(runs), tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert drawn == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert ("speed-up over none" in drawn) == undrafted
    for word in ("requests in flight", "bf16", "int4", "2 repeat(s)"):
        assert word in drawn
