"""What messages tell pip to install: of a clone, a wheel, an address and an index."""

import json
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution
from pathlib import Path

import pytest
from draftquant.recipes.installing import install_itself, install_line

METADATA = """Metadata-Version: 2.4
Name: draftquant
Version: 0.2.0
Requires-Dist: torch>=2.8
Provides-Extra: quark
Requires-Dist: amd-quark==0.13; extra == "quark"
Requires-Dist: ninja; extra == "quark"
Provides-Extra: zstd
Requires-Dist: zstandard; extra == "zstd"
"""


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, direct_url: object | None) -> None:
    """As pip leaves it: with a direct_url.json, or without where an index was asked."""
    info = folder / "draftquant-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA, encoding="utf-8")
    if direct_url is not None:
        said = direct_url if isinstance(direct_url, str) else json.dumps(direct_url)
        (info / "direct_url.json").write_text(said, encoding="utf-8")

    def found(name: str) -> Distribution:
        assert name == "draftquant"
        return PathDistribution(info)

    monkeypatch.setattr("importlib.metadata.distribution", found)


def test_it_comes_from_where_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone, wheel = tmp_path / "a clone", tmp_path / "draftquant-0.2.0-py3-none-any.whl"
    clone.mkdir()
    wheel.touch()
    commit = "0123456789abcdef0123456789abcdef01234567"
    git = {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": commit}}
    cases: list[tuple[object, str]] = [
        ({"url": f"file://{tmp_path}/a%20clone", "dir_info": {"editable": True}}, f"'{clone}'"),
        ({"url": f"file://{wheel}", "archive_info": {"hash": "sha256=0"}}, str(wheel)),
        ({"url": f"file:///no-such-folder/{wheel.name}", "archive_info": {}}, wheel.name),
        ({"url": "https://host/d.whl", "archive_info": {}}, "'draftquant @ https://host/d.whl'"),
        (git, f"'draftquant @ git+https://host/a.git@{commit}'"),
        (None, "draftquant==0.2.0"),
        ("no JSON", "draftquant==0.2.0"),
    ]
    for number, (said, expected) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        installed(folder, monkeypatch, said)
        assert install_itself() == f"pip install --no-deps {expected}"
        assert install_line("quark") == "pip install amd-quark==0.13 ninja"
    installed(tmp_path, monkeypatch, {"url": f"file://{tmp_path}", "dir_info": {"editable": True}})
    assert install_line("newer") == f"pip install '{tmp_path}[newer]'"  # than the installation


def test_code_never_installed_has_a_name_for_its_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", none)
    assert install_itself() == "pip install --no-deps CLONE"
    assert install_line("zstd") == "pip install 'CLONE[zstd]'"
