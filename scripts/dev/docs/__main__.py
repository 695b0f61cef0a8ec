"""The command that regenerates docs/reference and docs/pictures.

python -m draftquant.scripts.dev.docs
"""

import sys

from .. import ROOT
from .pages import PAGES
from .pictures import PICTURES

DOCS = ROOT / "docs"


def main() -> int:
    """Write every page and picture; returns the exit code, 0."""
    for name, made in {**PAGES, **PICTURES}.items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(made(), encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
