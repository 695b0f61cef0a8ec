"""Every generated page of docs/: its name there -> its generator."""

from collections.abc import Callable, Mapping

from .commands import commands_page
from .engines import engines_page
from .lints import lints_page
from .python import python_page
from .recipes import formats_page, recipes_page
from .report import report_page
from .traces import traces_page

PAGES: Mapping[str, Callable[[], str]] = {
    "reference/commands.md": commands_page,
    "reference/python.md": python_page,
    "reference/recipes.md": recipes_page,
    "reference/formats.md": formats_page,
    "reference/lints.md": lints_page,
    "reference/engines.md": engines_page,
    "reference/report.md": report_page,
    "reference/traces.md": traces_page,
}
