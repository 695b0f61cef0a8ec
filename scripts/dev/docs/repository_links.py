"""A hook of mkdocs: repository files that pages link to become part of the site, in `repository/`.

So a page has the same relative links on GitHub and on the site, and a link to a missing file
is a broken link of the site. A link to a folder means its README.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_ELSEWHERE = re.compile(r"[a-z]+:|/")
_PREFIX = "repository/"


def on_files(files: Files, *, config: Any) -> Files:
    """Add every file of the repository that a page links to, and the files that these link to."""
    root = Path(config.config_file_path).parent
    found = [file for file in files if file.src_uri.endswith(".md")]
    while found:
        file = found.pop()
        for _, path in _links(root, file.src_uri, file.content_string):
            added = _site_uri(path)
            if added.startswith(_PREFIX) and files.get_file_from_path(added) is None:
                made = File.generated(config, added, abs_src_path=str(root / path))
                files.append(made)
                if added.endswith(".md"):
                    found.append(made)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Point the links of a page to the files' places on the site."""
    root, folder = Path(config.config_file_path).parent, posixpath.dirname(page.file.src_uri)
    leads = dict(_links(root, page.file.src_uri, markdown))

    def led(match: re.Match[str]) -> str:
        path = leads.get(match[2])
        if path is None:
            return match[0]
        return match[1] + posixpath.relpath(_site_uri(path), folder or ".") + match[3]

    return _LINK.sub(led, markdown)


def _links(root: Path, src_uri: str, markdown: str) -> list[tuple[str, str]]:
    """Links of a page to existing files, each with the file's path in the repository."""
    folder = posixpath.dirname(_repository_path(src_uri))
    found = []
    for _, link, _ in _LINK.findall(markdown):
        if _ELSEWHERE.match(link):
            continue
        path = posixpath.normpath(posixpath.join(folder, link))
        if (root / path).is_dir():
            path = posixpath.join(path, "README.md")
        if not path.startswith("..") and os.path.isfile(root / path):  # noqa: PTH113
            found.append((link, path))
    return found


def _repository_path(src_uri: str) -> str:
    inside = src_uri.removeprefix(_PREFIX)
    return inside if inside != src_uri else f"docs/{src_uri}"


def _site_uri(path: str) -> str:
    inside = path.removeprefix("docs/")
    return inside if inside != path else _PREFIX + path
