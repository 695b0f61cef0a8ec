"""The report for people and for CI: a page that loads nothing, Markdown, JUnit; hostile text."""

import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from draftquant.recipes.errors import visible
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.report import words
from draftquant.validate.report.document import Judgement
from draftquant.validate.report.html_report import page
from draftquant.validate.report.report_texts import MOST_ROWS, code, escaped, junit, markdown
from draftquant.validate.report.words import NONE
from draftquant.validate.served.served_gate import judge_measured
from handmade_measurements import alternating, measurement
from handmade_replays import FIGURES, RELEASE, noisy, replay, spread
from handmade_reports import EVIL, HASHES, comparison, document, evil_document, joint, served

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


def test_a_page_is_whole(subtests: pytest.Subtests) -> None:
    for kind in KINDS:
        with subtests.test(kind):
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


def test_a_page_shows_what_was_judged_beside() -> None:
    found = Page(page(document(joint())))
    for text in ("Server noise: ✓ PASS", "gsm8k exact_match", "compared by weighted verify steps",
                 "The chart under Replayed, whose verdict counts, shows this"):  # fmt: skip
        assert text in " ".join(found.text.split())
    drawn = [attributes["aria-labelledby"] for tag, attributes in found.tags if tag == "svg"]
    assert [(each or "").partition("-")[0] for each in drawn] == [
        "forest", "scatter", "positions", "histogram",
    ]  # fmt: skip
    assert "Replayed" in found.text[found.text.index("one-sided 95%") :]  # both are series of it


def test_of_drafts_that_cannot_be_compared_nothing_is_drawn_but_their_counts() -> None:
    """Of other traces, or of another K each."""
    other = replay(spread(600), traces=dataclasses.replace(FIGURES, sha256="1" * 64))
    text = page(document(judge(replay(spread(600)), other, RELEASE)))
    assert ['id="forest-title"' in text, 'id="histogram-title"' in text] == [False, True]
    for depths in ((1, 2), (2, 1)):
        rows = [alternating(200, 80 + i % 5) for i in range(40)]
        runs = (measurement(rows, name=f"{k}", num_draft_tokens=k) for k in depths)
        read = document(judge_measured(*runs, RELEASE))
        assert read.judgement.verdict == "ANOMALOUS"
        found = Page(page(read)).text
        assert f"drafted {depths[0]} and {depths[1]} tokens per verify step" in found


def test_hostile_text_is_text_in_every_form() -> None:
    text, inline = page(evil_document()), markdown(evil_document())
    found = Page(text)
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "a"})
    assert text.count("</title>") == text.count("<title")
    assert visible(EVIL) in found.text
    cases = junit(evil_document())
    names = [case.get("name") for case in ElementTree.fromstring(cases).iter("testcase")]
    assert names == ["verdict"]  # its categories have too few prompts
    for form in (text, inline, cases):
        assert {"\x1b", "\u202e"}.isdisjoint(form)
        assert "<script" not in form
    prose = re.sub(r"<code>.*?</code>", "", inline)
    assert not any(one in prose for one in ("](", "@octocat", "http://evil"))
    rows = [line for line in inline.splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {9, 4}


# ---- Markdown


def test_prompts_in_words() -> None:
    counted = [words.prompts(96, 0), words.prompts(96, 1, 95), words.prompts(96, 0, 96)]
    assert counted == ["96", "95 (96 recorded + 1 too short)", "96"]


def test_of_many_categories_the_largest_are_shown() -> None:
    """Category i has i + 1 prompts, of 70; GitHub takes 65,536 characters."""
    names = "".join(chr(0x4E00 + i) * (i + 1) for i in range(70))
    rows = spread(600, len(names)), noisy(3, 4, len(names))
    judged = judge(*(replay(each, categories=names) for each in rows), RELEASE, background=HASHES)
    text = markdown(document(judged))
    assert f"and {71 - MOST_ROWS} more, in the report." in text
    assert len(text) < 65_536
    text = page(document(judged))
    assert "(10 smaller ones are in the table only)" in text
    chart = text[text.index('id="forest-title"') : text.index("</svg>")]
    assert [f"{names[0]}: " in chart, f"{names[-1]}: " in chart] == [False, True]
    assert text.count(f">{names[0]}<") == 1


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


# ---- JUnit


def cases(judged: Judgement, **options: Any) -> dict[str, str]:
    """Names of the test cases, and how they went."""
    root = ElementTree.fromstring(junit(document(judged), **options))
    found = {
        f"{case.get('classname')}: {case.get('name')}": case[0].tag if len(case) else "passed"
        for case in root.iter("testcase")
    }
    results = list(found.values())
    for element in (root, root[0]):
        assert element.get("tests") == str(len(found))
        assert element.get("failures") == str(results.count("failure"))
        assert element.get("errors") == str(results.count("error"))
        assert element.get("skipped") == str(results.count("skipped"))
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


def test_bounds_of_a_few_prompts_are_not_shown() -> None:
    """c has nine prompts; with ten its bounds would stand there, unjudged or not."""
    found = document(by_category())
    rows = [line.split(" | ") for line in markdown(found).splitlines() if line.startswith("| `")]
    assert [(row[0], row[5] == NONE) for row in rows] == [
        ("| `a`", False), ("| `b`", False), ("| `c`", True),
    ]  # fmt: skip
    assert page(found).count(f'data-label="Bounds" class="number">{NONE}<') == 1


def test_categories_are_test_cases_where_they_were_judged() -> None:
    open_one = by_category()
    assert (open_one.verdict, [own.outcome for own in open_one.categories]) == (
        "PASS", ["PASS", "INCONCLUSIVE", None],
    )  # fmt: skip
    assert cases(open_one) == {
        "draftquant gate: verdict": "passed",
        "category: a": "passed",
        "category: b": "skipped",
    }
    assert cases(by_category(every=True)) == {
        "draftquant gate: verdict": "error",
        "category: a": "passed",
        "category: b": "error",
    }


def test_a_test_case_of_each_judgement() -> None:
    assert cases(joint()) == dict.fromkeys(
        ("draftquant gate: verdict", "draftquant gate: Replayed", "draftquant gate: Served",
         "draftquant gate: server noise", "parity: task: gsm8k exact_match"), "passed",
    )  # fmt: skip
