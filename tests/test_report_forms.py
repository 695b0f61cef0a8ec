"""The report for people and for CI: a page that loads nothing, its charts, Markdown, JUnit."""

import dataclasses
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import corpus
import pytest
from draftquant.quantize.drafts.recognition import read_draft
from draftquant.quantize.engines.plan_verdicts import planned_verdicts
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import visible
from draftquant.validate.judging.candidate_origin import DraftFolder
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.report import plots, words
from draftquant.validate.report.document import Judgement
from draftquant.validate.report.facts import engine_facts, folder_facts
from draftquant.validate.report.html_report import page
from draftquant.validate.report.report_texts import code, escaped, junit, markdown
from draftquant.validate.report.words import NONE
from handmade_replays import RELEASE, noisy, replay, spread
from handmade_reports import EVIL, comparison, document, evil_document, joint, served
from test_gate_parts import clustered
from test_paired import change_of
from told import check_told

KINDS: dict[str, Callable[[], Judgement]] = {
    "PASS": comparison,
    "ANOMALOUS": lambda: comparison("ANOMALOUS"),
    "joint": joint,
    "served": served,
}
VOID = {"meta"}


class Page(HTMLParser):
    """The tags, attributes and text of a page; fails where a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_whole(kind: str) -> None:
    text = page(document(KINDS[kind]()))
    found = Page(text)
    names = {tag for tag, _ in found.tags}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "a"})
    assert "default-src 'none'" in text
    loading = {"src", "href", "xlink:href", "action"}
    assert not any(loading & attributes.keys() for _, attributes in found.tags)
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)", text)) <= {"#histogram-candidate"}
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in found.tags:
        if tag == "svg":
            labels = (attributes["aria-labelledby"] or "").split()
            assert len(labels) == 2
            assert set(labels) <= set(ids)
        if tag == "rect" and "x" in attributes:
            assert float(attributes["x"] or 0) + float(attributes["width"] or 0) <= 400


def test_hostile_text_is_text_in_every_form() -> None:
    evil = evil_document()
    text, inline = page(evil), markdown(evil)
    found = Page(text)
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "a"})
    assert text.count("</title>") == text.count("<title")
    assert visible(EVIL) in found.text
    failing = dataclasses.replace(evil.judgement, verdict="FAIL", reason=EVIL)
    cases = junit(dataclasses.replace(evil, judgement=failing))
    names = [case.get("name") for case in ElementTree.fromstring(cases).iter("testcase")]
    assert names == ["verdict"]  # its categories have too few prompts
    for form in (text, inline, cases):
        assert {"\x1b", "\u202e"}.isdisjoint(form)
        assert "<script" not in form
    prose = re.sub(r"<code>.*?</code>", "", inline)
    assert not any(one in prose for one in ("](", "@octocat", "http://evil"))
    rows = [line for line in inline.splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {9, 4}


def test_prompts_and_hashes_in_words() -> None:
    assert words.digest("0123456789ab" + "f" * 52) == "0123456789ab"
    assert comparison().sample == "40"


@pytest.mark.parametrize("beyond", [1e-4, 1e-6, -1e-6])
def test_each_figure_is_told_from_the_limit_beside_it(beyond: float) -> None:
    """The change, either bound of it, and those of a part."""
    at = math.log1p(-0.01 - beyond)
    missed = dataclasses.replace(change_of(at, 0.1), lower=at, upper=at)
    row = words.ComparisonRow(name="", prompts="9", before=2.0, after=1.98, change=missed,
                              bounds=missed, limit=0.01, outcome=None)  # fmt: skip
    *_, change, bounds, limit = row.cells
    assert {change, *bounds.split(" to ")} == {change} != {limit}


def test_prompts_are_one_number_in_every_form() -> None:
    """Of 42, one is a copy, one has no verify step, and three are related."""
    rows, texts = [(0, 0), *spread(600, 41)], [50, 7, 7, *range(8, 47)]
    clusters = [f"c{max(i, 5)}" for i in range(42)]
    found = judge(*(clustered(replay(own, texts=texts), clusters) for own in (rows, rows)), RELEASE)
    assert (found.num_prompts, found.num_clusters, found.sample) == (40, 37, "37 (42 recorded)")
    judged = document(found)
    for text in (page(judged), markdown(judged)):
        assert "37 (42 recorded)" in text
        assert not re.search(r"\b40 (distinct|prompts|recorded)", text)
    assert "1 of the 42 prompts is left out" in Page(page(judged)).text


def test_a_figure_that_is_too_long_for_a_phone_goes_on_in_the_next_line() -> None:
    """In two columns of 185 pixels, less a name of 90; else it lies over the next figure."""
    wide, narrow = page(document(comparison())).split("@media (max-width: 46rem)", 1)
    assert ".number { white-space: nowrap; }" in wide
    assert ".number { white-space: normal; }" in narrow


def test_a_report_has_the_engines_and_the_roles_that_quantize_named() -> None:
    made = corpus.quantized("eagle3-llama", "fp8-ptpc", pair=True)
    plan = make_plan(
        load_recipe("fp8-ptpc"), read_draft(Checkpoint.open(corpus.PAIRS / "eagle3-llama/draft"))
    )
    asked = [(one.engine, one.arch) for one in planned_verdicts(plan)]
    assert [(one.engine, one.arch) for one in engine_facts(made, "fp8")] == asked
    assert folder_facts("org/fp8", DraftFolder.read(made)).name == "org/fp8"
    facts = folder_facts("fp8", DraftFolder.read(made)).quantized
    assert facts is not None
    roles = {role for rule in facts.rules for role in rule.tensors.split(", ")}
    assert roles == {row.role for row in plan.draft.rows}
    folder = DraftFolder.read(made)
    record = dataclasses.replace(folder.record, dropped={"fc.weight": "of its target"},
                                 learned_norms={"midlayer.mlp.up_proj.weight": 1.0})  # fmt: skip
    less = folder_facts("fp8", dataclasses.replace(folder, record=record)).quantized
    assert (less.num_quantized, less.num_kept) == (facts.num_quantized - 1, facts.num_kept)
    assert {"kv_up", "mask"} & {role for rule in plan.recipe.rules for role in rule.role}


def test_text_means_nothing_in_markdown() -> None:
    for text, expected in (
        ("a-b (1.5%)", "a-b (1.5%)"), ("- x", "&#45; x"), ("1. x", "1&#46; x"),
        ("*b*", "&#42;b&#42;"), ("a|b\\|c", "a&#124;b&#92;&#124;c"),
        ("<b>&", "&#60;b&#62;&#38;"), ("@who #1", "@\u200bwho &#35;\u200b1"),
        ("https://x www.y", "https:\u200b//x www\u200b.y"), ("a\nb", "a&#92;nb"),
    ):  # fmt: skip
        assert escaped(text) == expected
    assert code("org/draft-1.5") == "`org/draft-1.5`"
    assert code("a`b|c") == "<code>a&#96;b&#124;c</code>"
    assert len(code("x" * 1000)) == 302


def cases(judged: Judgement, **options: Any) -> dict[str, str]:
    """Names of the test cases, and how they went."""
    root = ElementTree.fromstring(junit(document(judged), **options))
    found = {
        f"{case.get('classname')}: {case.get('name')}": case[0].tag if len(case) else "passed"
        for case in root.iter("testcase")
    }
    results = list(found.values())
    kinds = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    for element in (root, root[0]):
        assert element.get("tests") == str(len(found))
        assert {k: element.get(k) for k in kinds} == {
            k: str(results.count(kind)) for k, kind in kinds.items()
        }
    return found


def test_a_verdict_is_a_test_case_that_may_be_skipped_where_it_fails_no_job() -> None:
    for verdict, result, skipped in (
        ("PASS", "passed", "passed"), ("FAIL", "failure", "failure"),
        ("INCONCLUSIVE", "error", "skipped"), ("ANOMALOUS", "error", "error"),
    ):  # fmt: skip
        found = comparison(verdict)
        assert cases(found)["draftquant gate: verdict"] == result
        assert cases(found, inconclusive="skipped")["draftquant gate: verdict"] == skipped


def test_a_green_job_has_no_red_case() -> None:
    """Too few prompts for a verdict, and a category of many among them that fails by itself."""
    baseline = [(4000, 6000)] * 5 + spread(600, 30)
    candidate = [(4010, 5990)] * 5 + noisy(64, 4, 30)
    names = "a" * 5 + "b" * 30
    judged = judge(replay(baseline, categories=names), replay(candidate, categories=names), RELEASE)
    assert judged.verdict == "INCONCLUSIVE"
    assert [own.outcome for own in judged.categories] == [None, "FAIL"]
    assert list(cases(judged).values()) == ["error", "failure"]
    assert list(cases(judged, inconclusive="skipped").values()) == ["skipped"] * 2


def by_category(*, every: bool = False) -> GateReport:
    """PASS as a whole; a passes, b is open, c has too few prompts."""
    policy = dataclasses.replace(
        RELEASE, name="custom", every_category_passes=every, max_category_drop=0.0101
    )
    open_one = [(1000 - x, x) for i in range(30) for x in [600 + i % 5 + (150 if i % 2 else -150)]]
    rows = spread(600, 30) * 2 + spread(600, 9), noisy(0, 4, 30) + open_one + noisy(0, 4, 9)
    names = "a" * 30 + "b" * 30 + "c" * 9
    wide = dataclasses.replace(policy, max_relative_drop=0.3)
    return judge(*(replay(each, categories=names) for each in rows), wide)


def test_categories_are_test_cases_where_they_were_judged() -> None:
    open_one = by_category()
    outcomes = [own.outcome for own in open_one.categories]
    assert (open_one.verdict, outcomes) == ("PASS", ["PASS", "INCONCLUSIVE", None])
    assert list(cases(open_one).items()) == [
        ("draftquant gate: verdict", "passed"), ("category: a", "passed"),
        ("category: b", "skipped"),
    ]  # fmt: skip
    assert list(cases(by_category(every=True)).values()) == ["error", "passed", "error"]
    # c has nine prompts; with ten its bounds would stand there, unjudged or not.
    found = document(open_one)
    rows = [line.split(" | ") for line in markdown(found).splitlines() if line.startswith("| `")]
    assert [(row[0], row[5] == NONE) for row in rows] == [
        ("| `a`", False), ("| `b`", False), ("| `c`", True),
    ]  # fmt: skip
    assert page(found).count(f'data-label="Bounds" class="number">{NONE}<') == 1


def test_a_test_case_of_each_judgement() -> None:
    assert cases(joint()) == dict.fromkeys(
        ("draftquant gate: verdict", "draftquant gate: Replayed", "draftquant gate: Served",
         "draftquant gate: server noise", "parity: task: gsm8k exact_match"), "passed",
    )  # fmt: skip


ROWS = (
    plots.Interval(label="all prompts", estimate=-0.002, lower=-0.006, upper=0.002, limit=-0.01,
             whole=True),
    plots.Interval(label="chat", estimate=-0.01, lower=-0.02, upper=0.0, limit=-0.03),
    plots.Interval(label="wide", estimate=0.01, lower=-0.9, upper=0.9, limit=-0.03, judged=False),
    plots.Interval(label="one prompt", estimate=None, limit=-0.03),
)  # fmt: skip


def test_of_many_categories_the_largest_are_drawn() -> None:
    names = "".join(map(chr, (*range(0x100, 0x13D), 0x13D, 0x13D)))
    both = (replay(rows, categories=names) for rows in (spread(600, 63), noisy(3, 4, 63)))
    text = page(document(judge(*both, RELEASE)))
    assert (f"{names[59]}: " in text, f"{names[-1]}: " in text) == (False, True)


def lengths(count: int) -> list[plots.Lengths]:
    return [
        plots.Lengths(label=f"{i}", baseline=1 + i % 7 / 4, candidate=1 + i % 5 / 3, steps=i + 1)
        for i in range(count)
    ]


def test_every_chart_is_drawn_as_it_is_kept() -> None:
    """An element a line, in told/charts.txt: a mark that moves, or is left out, is seen there."""
    two = [dataclasses.replace(row, series=i % 2, label=row.label * (1 - i % 2))
           for i, row in enumerate(ROWS)]  # fmt: skip
    sides = words.SideNames("before", "after", "before and after")
    named = {"title": "changes", "bounds": "bounds"}
    charts = {
        "forest": plots.forest("f", ROWS, **named),
        "forest of two": plots.forest("f", two, series=("first", "second"), **named),
        "contexts": plots.contexts(lengths(5), words.DRAFTS),
        "contexts of many": plots.contexts(lengths(19), sides),
        "positions": plots.positions(((0.8, 0.5), (0.7, 0.5)), words.DRAFTS),
        "positions of one": plots.positions(((0.8,), (0.7,)), sides),
        "histogram": plots.histogram(((3, 2, 1), (2, 2, 2)), words.DRAFTS),
        "histogram of many": plots.histogram((range(1, 21), range(20, 0, -1)), sides),
        "scatter": plots.scatter(lengths(9), words.DRAFTS, limit=0.1),
        "scatter of many": plots.scatter(lengths(2001), sides, limit=0.9)[:3000],
    }
    check_told("charts", {name: svg.replace("><", ">\n<") for name, svg in charts.items()})
