"""Who listens where Python calls: a bar in a notebook's cell or on stderr, or the log alone."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from ...recipes.listener import SILENT, Bar, Listener, Unit


class ProgressListener(Listener):
    """Shows a bar of what runs: in the output of a notebook's cell, elsewhere on stderr.

    Notebooks have it by default. In a script: `dq.replay(..., listener=dq.ProgressListener())`.
    """

    @override
    @contextmanager
    def bar(self, label: str, total: int | None, unit: Unit = "items") -> Iterator[Bar]:
        """Something of `total` items or bytes begins, and a bar shows how far it is."""
        if in_notebook():
            from .notebook import cell_bar as shown
        else:
            from .progress import progress_bar as shown
        with shown(label, total, unit) as bar:
            yield bar


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(each.__name__ == "ZMQInteractiveShell" for each in type(shell).__mro__)


def usual_listener() -> Listener:
    """Who listens where nobody is named: a bar in a notebook, else the log alone."""
    return ProgressListener() if in_notebook() else SILENT
