"""Engines are known by (name, version); a version is a row of `ENGINES`."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from draftquant.quantize.engines import versions
from draftquant.quantize.engines.contract import ENGINE_NAMES, Scheme, version_rows
from draftquant.quantize.engines.engine import Engine
from draftquant.quantize.engines.vllm_rules import Vllm
from draftquant.scripts.cli import main
from typing_extensions import override

ENGINES_FOLDER = Path(__file__).parents[1] / "experiments" / "engines"
sys.path.append(str(ENGINES_FOLDER))  # its modules stand alone

from cases import Workshop  # noqa: E402
from formats import format_recipe  # noqa: E402

KNOWN = [("vllm", "0.33.0"), ("sglang", "0.5.23"), ("tensorrt-llm", "main at 008e0af8")]
TENSORRT_LLM_NAME = "EAGLE3LlamaForCausalLM"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quark's INT4 per channel, which vLLM 0.33.0 refuses."""
    workshop = Workshop(tmp_path_factory.mktemp("versions"))
    recipe = format_recipe("quark", "int4-channel", "weights-only")
    return workshop.quantize(workshop.source("eagle3-llama"), recipe, "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Later(Vllm):
    """VLLM as 0.33.0, but for INT4 per channel and an architecture."""

    @override
    def row(self, signature: str, arch: str) -> Scheme | None:
        if signature == "quark int4 channel none":
            return Scheme("QuarkW4A16Int4")
        return Vllm.row(self, signature, arch)


def later(version: str) -> Engine:
    """A row of versions.toml more."""
    row = next(row for row in version_rows() if row["name"] == "vllm")
    changed = {"version": version, "evidence": "made up for a test"}
    return Later(**row | changed | {"models": frozenset({TENSORRT_LLM_NAME})})


@pytest.fixture
def two_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM 0.4.0 and 0.34.0, each a row more."""
    known = list(versions.ENGINES.values())
    rows = [later("0.4.0"), known[0], later("0.34.0"), *known[1:]]
    found = {(engine.name, engine.version): engine for engine in rows}
    monkeypatch.setattr(versions, "ENGINES", found)


def test_the_known_versions() -> None:
    assert list(versions.ENGINES) == KNOWN
    assert [(engine.name, engine.version) for engine in versions.newest_engines()] == KNOWN
    assert tuple(name for name, _ in KNOWN) == ENGINE_NAMES


@pytest.mark.usefixtures("two_more")
def test_check_uses_the_version_that_is_asked_for(
    draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["check", str(draft), "--engine", "vllm", "--gpu", "sm90", "--json"]
    said = {}
    for version in ("0.33.0", "0.34.0", "0.4.0", "0.35.0"):
        status = main([*command, "--version", version])
        said[version] = (status, json.loads(capsys.readouterr().out))
    assert [status for status, _ in said.values()] == [1, 0, 0, 3]
    assert "must be a positive int, got None" in said["0.33.0"][1]["error"]
    assert said["0.34.0"][1]["version"] == "0.34.0"
    assert said["0.34.0"][1]["evidence"] == "made up for a test"
    assert said["0.35.0"][1]["error"] == (
        "The rules of vLLM 0.35.0 are not known, only those of 0.4.0, 0.33.0, 0.34.0"
    )
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == said["0.34.0"][1]  # 0.34 is newer than 0.4
