"""The look of charts and pages: the style sheet of this package, and a drawing that carries it."""

from jinja2 import Environment, PackageLoader

_FILES = PackageLoader("draftquant.validate.charts", "")


def style_sheet() -> str:
    """CSS: colours for light, dark and paper, and what the classes of charts look like."""
    source, _, _ = _FILES.get_source(Environment(autoescape=True), "look.css")
    return source


def standalone(svg: str) -> str:
    """A drawing of this package as a file of its own, light or dark as whoever looks at it.

    Args:
        svg: what a chart returned.
    """
    head, rest = svg.split(">", 1)
    style = f"<style>{style_sheet()}svg {{ background: var(--paper); }}</style>"
    return f'{head} width="800">{style}{rest}\n'
