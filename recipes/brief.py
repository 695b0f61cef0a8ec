"""`Brief`: a report as a REPL and a notebook show it, in a few lines instead of whole."""

import html
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import visible

_LONGEST, _LONGEST_CELL = 60, 300
"""Characters of one value, in a line and in a table."""
_WIDTH = 99
"""Columns of each of at most three lines; with line ends that is at most 300 characters."""
_MOST_DIGITS = 13
"""Digits of a figure: more are its rounding."""
_TONES = {
    "PASS": "#0a8f63", "LOADS": "#0a8f63", "verified": "#0a8f63",
    "FAIL": "#d1443a", "REFUSED": "#d1443a", "WRONG": "#d1443a",
    "INCONCLUSIVE": "#a97800", "UNKNOWN": "#a97800", "ANOMALOUS": "#9a55b0",
}  # fmt: skip
"""First word of a headline -> a colour that can be read on white and on black."""
_STYLE = (
    "<style scoped>.dq{border-collapse:collapse;color:inherit;background:none}"
    ".dq caption{caption-side:top;text-align:left;padding:2px 0;color:inherit}"
    ".dq th,.dq td{text-align:left!important;padding:2px 14px 2px 0;border:0;font-weight:400;"
    "border-bottom:1px solid #8884;background:none}.dq th{opacity:.7}</style>"
)


def counted(number: int, noun: str) -> str:
    """A number of things: 1 recipe, 2 recipes."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_of(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Brief(ABC):
    """What a verb returns, as a `repr` of at most 300 characters and as a table in a notebook."""

    __slots__ = ()

    @abstractmethod
    def brief(self) -> Mapping[str, object]:
        """Label -> figure; the first figure is the headline, whose label is not shown."""

    def __repr__(self) -> str:
        headline, *rest = _shown(self.brief(), _LONGEST)
        parts = [headline[1], *(f"{label} {value}" for label, value in rest if value)]
        text = f"<{type(self).__name__} {'; '.join(parts)}>"
        return textwrap.fill(text, _WIDTH, subsequent_indent="  ", max_lines=3, placeholder="…>")

    def _repr_html_(self) -> str:
        headline, *rest = _shown(self.brief(), _LONGEST_CELL)
        tone = _TONES.get(headline[1].partition(" ")[0].rstrip(":,"), "inherit")
        shown = ((html.escape(label), html.escape(value)) for label, value in rest if value)
        rows = "".join(f"<tr><th>{label}</th><td>{value}</td></tr>" for label, value in shown)
        caption = f'<b style="color:{tone}">{html.escape(headline[1])}</b>'
        return f'{_STYLE}<table class="dq"><caption>{caption}</caption>{rows}</table>'


def megabytes(nbytes: float) -> str:
    """Bytes as people write them: 0.3 MB, 12 MB, 3.2 GB."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.1f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 1e7 else f"{nbytes / 1e6:,.0f} MB"


def percent(share: float | None) -> str | None:
    """A relative change as people write it: -0.35%; None if it is not known."""
    return None if share is None else f"{share:+.2%}"


def apart(value: float, limit: float | None, form: str) -> str:
    """A figure in a form such as ".1f" or "+.2%", with the digits that tell it from its limit."""
    flags, digits, kind = form.partition(".")[0], int(form[form.index(".") + 1]), form[-1]
    longer = [f"{flags}.{number}{kind}" for number in range(digits, _MOST_DIGITS)]
    if limit is None:
        return format(value, form)
    told = (text for each in longer if (text := format(value, each)) != format(limit, each))
    return next(told, format(value, form))


def _shown(brief: Mapping[str, object], longest: int) -> list[tuple[str, str]]:
    """Each value on one line of bounded length; a path keeps its end, which says more."""
    shown = []
    for label, value in brief.items():
        text = "" if value is None else visible(str(value))
        if len(text) > longest:
            cut = longest - 1
            text = f"…{text[-cut:]}" if isinstance(value, Path) else f"{text[:cut]}…"
        shown.append((label, text))
    return shown
