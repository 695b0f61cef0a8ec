"""Charts: marks lie where their numbers are, text is cut and escaped, and colours have contrast."""

import re
from xml.etree import ElementTree

import pytest
from draftquant.validate.report.plots import (
    Interval,
    Lengths,
    forest,
    histogram,
    positions,
    scatter,
)
from draftquant.validate.report.svg import (
    WIDTH,
    Drawing,
    Scale,
    percent,
    style_sheet,
    ticks,
)


def drawn(svg: str) -> ElementTree.Element:
    """Without the namespace."""
    return ElementTree.fromstring(svg.replace(' xmlns="http://www.w3.org/2000/svg"', ""))


def of(svg: str, tag: str, look: str) -> list[dict[str, str]]:
    return [
        dict(element.attrib)
        for element in drawn(svg).iter(tag)
        if set(look.split()) <= set(element.get("class", "").split())
    ]


def words(svg: str) -> list[str]:
    return [element.text or "" for element in drawn(svg).iter("text")]


def test_ticks_are_round_and_a_scale_is_straight() -> None:
    assert ticks(0, 1) == pytest.approx((0, 0.2, 0.4, 0.6, 0.8, 1.0))
    assert ticks(-0.013, 0.004) == pytest.approx((-0.01, -0.005, 0.0))
    assert [percent(x) for x in (0.0, -0.03, 0.005)] == ["0%", "\u22123%", "+0.5%"]
    scale = Scale(-1, 1, 100, 200)
    assert [scale(x) for x in (-1, 0, 1)] == [100, 150, 200]
    assert (scale.clipped(5), scale.holds(1), scale.holds(1.01)) == (200, True, False)


ROWS = (
    Interval(label="all prompts", estimate=-0.002, lower=-0.006, upper=0.002, limit=-0.01,
             whole=True),
    Interval(label="chat", estimate=-0.01, lower=-0.02, upper=0.0, limit=-0.03),
    Interval(label="wide", estimate=0.01, lower=-0.9, upper=0.9, limit=-0.03, judged=False),
    Interval(label="one prompt", estimate=None, limit=-0.03),
)  # fmt: skip


def test_a_forest_has_a_row_for_each_interval() -> None:
    svg = forest("f", ROWS, title="changes", bounds="one-sided 95% bounds")
    assert len(of(svg, "polygon", "full candidate")) == 1 + 2  # a diamond and two arrow heads
    limits = of(svg, "line", "limit")
    assert len(limits) == 4 + 1  # and the legend's
    assert float(limits[1]["x1"]) > float(limits[2]["x1"])  # -1 % lies right of -3 %
    assert {"not judged", "no bounds"} <= set(words(svg))
    spans = of(svg, "line", "span candidate")
    assert all(0 <= float(line[x]) <= WIDTH for line in spans for x in ("x1", "x2"))
    assert "chat: -1.00% (-2.00% to +0.00%)" in (drawn(svg).findtext("desc") or "")


def test_bounds_lie_where_the_ticks_say() -> None:
    svg = forest("f", ROWS[:2], title="changes", bounds="bounds")
    at = {text: float(element.get("x") or 0) for element in drawn(svg).iter("text")
          if (text := element.text or "").endswith("%")}  # fmt: skip
    zero, two = at["0%"], at["\u22122%"]
    (circle,) = of(svg, "circle", "full")
    assert float(circle["cx"]) == pytest.approx((zero + two) / 2, abs=0.02)


def test_heights_and_dots_are_those_of_the_numbers() -> None:
    heights = [float(each["cy"]) for each in of(positions((0.8, 0.6), (0.7, 0.5)), "circle",
                                                "full baseline")[:2]]  # fmt: skip
    assert heights[0] < heights[1]  # up is more
    full = of(histogram((1, 3), (2, 2)), "rect", "full baseline")
    assert float(full[1]["height"]) / float(full[0]["height"]) == pytest.approx(3, rel=1e-3)
    lengths = [(2 + i / 10, 2 + i / 20) for i in range(5)]
    dots = [Lengths(label="", baseline=b, candidate=q, steps=1) for b, q in lengths]
    assert drawn(scatter(dots, limit=0.01)).findtext("desc") == (
        "5 prompts: 4 accept less quantized, 0 more, 1 the same."
    )
    assert len(of(scatter(dots * 1000, limit=0.01), "circle", "dot")) <= 2000


def test_text_that_has_no_room_is_cut_and_kept() -> None:
    drawing = Drawing("d", 20, title="t", described="d")
    drawing.label(100, 10, "<a> & a name that is much too long\x1b", 60)
    (label,) = drawn(drawing.to_text()).findall("text")
    assert len(label.text or "") <= 60 / 6
    assert label[0].text == "<a> & a name that is much too long\\x1b"


def luminance(colour: str) -> float:
    """Relative, of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_text_and_marks_have_contrast_in_light_dark_and_print() -> None:
    """WCAG 2.1: 4.5 for text, 3 for what has to be seen of a drawing."""
    blocks = re.findall(r":root \{(.*?)\}", style_sheet(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        colour = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        for name in ("ink", "soft", "pass", "fail", "inconclusive", "anomalous"):
            for ground in ("paper", "panel"):
                assert contrast(colour[name], colour[ground]) >= 4.5, (name, ground)
        for name in ("baseline", "candidate", "limit", *(f"other-{i}" for i in range(1, 5))):
            assert contrast(colour[name], colour["paper"]) >= 3, name
