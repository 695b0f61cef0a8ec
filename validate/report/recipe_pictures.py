"""Pictures of several reports, for a README or a page of documentation: files of their own."""

from collections.abc import Sequence

from ..charts.bars import Bar, bars
from ..charts.forest import forest
from ..charts.svg import standalone
from ..errors import GateError
from ..judging.verdict import in_percent
from . import words
from .document import Document
from .part_charts import interval


def changes_by_recipe(documents: Sequence[Document]) -> str:
    """The change that each report found, with its bounds and its limit, as an SVG file.

    Args:
        documents: reports of one baseline, at least one; a row each, in their order.

    Raises:
        GateError: there is no report, or one of another baseline, or of other traces.
    """
    if not documents:
        raise GateError("reports", "expected one at least, got none", fix="give what gate wrote")
    rows = []
    for document in documents:
        _, found = document.comparisons[0]
        _check_alike(documents[0], document)
        made = document.header.drafts.candidate
        label = made.name if made.quantized is None else made.quantized.recipe
        rows.append(interval(label, found.change, found.policy.max_relative_drop))
    _, first = documents[0].comparisons[0]
    confidence = "" if first.change is None else f" {in_percent(first.change.confidence)}"
    svg = forest(
        "recipes",
        rows,
        title="Change of the acceptance length by recipe, with its bounds and its limit",
        bounds=f"one-sided{confidence} bounds",
    )
    return standalone(svg)


def bytes_by_recipe(nbytes: Sequence[tuple[str, int]]) -> str:
    """The bytes of a draft under each recipe, as an SVG file.

    Args:
        nbytes: name and bytes of all tensors, the unquantized draft first; at least one.
    """
    _, whole = nbytes[0]
    rows = [
        Bar(
            label=name,
            value=number,
            text=words.nbytes(number)
            + (f", {words.share(1 - number / whole)} less" if number < whole else ""),
        )
        for name, number in nbytes
    ]
    return standalone(bars("bytes", rows, title="Bytes of all tensors of a draft, by recipe"))


def _check_alike(first: Document, other: Document) -> None:
    one, two = (document.comparisons[0][1] for document in (first, other))
    traces = [None if each.traces is None else each.traces.sha256 for each in (one, two)]
    if one.background.baseline_sha256 != two.background.baseline_sha256 or traces[0] != traces[1]:
        name = other.header.drafts.candidate.name
        raise GateError(
            name,
            "was judged against another baseline, or on other traces, than the first report",
            fix="run the gate of all drafts on the same traces",
        )
