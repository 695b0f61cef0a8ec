"""Drafts, quantized folders and traces that are made once, read by many tests and changed by none.

They lie under build/corpus in a folder named by what makes them: the product's files, this one, and
the versions of torch and transformers. So they stay from run to run until one of these changes, and
two workers share them: each is made beside its place and renamed, and who comes second throws its
own away. A test that changes a folder copies it first (`shutil.copytree`). $DRAFTQUANT_CORPORA is
another place for them, where a mutant has a hand in what is made (scripts/dev/mutants).
"""

import functools
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draftquant.api as dq
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_mla import tiny_eagle3_mla

ROOT = Path(__file__).resolve().parents[1]
PAIRS = Path(__file__).parent / "pairs"
"""The shipped pairs: folders with a draft, a target, prompts.jsonl."""
_PRODUCT = ("recipes", "quantize", "calibration", "validate")
_BUILDERS: dict[str, Callable[[Path], Path]] = {
    "eagle3-llama": tiny_eagle3_llama,
    "eagle3-mla": tiny_eagle3_mla,
    "dflash": tiny_dflash,
}


def draft(kind: str) -> Path:
    """A tiny draft of a family: "eagle3-llama", "eagle3-mla" or "dflash", with random weights."""
    return made(f"{kind}-draft", _BUILDERS[kind])


def quantized(kind: str, recipe: str, *, pair: bool = False, measured: bool = False) -> Path:
    """`draft(kind)`, or the draft of a shipped pair, by a built-in recipe in torch's arithmetic.

    Args:
        pair: of the shipped pair.
        measured: with `traces(kind)`, which a recipe by GPTQ or with static scales wants.
    """
    source = PAIRS / kind / "draft" if pair else draft(kind)
    given: Any = {"traces": traces(kind), "target": PAIRS / kind / "target"} if measured else {}
    name = "-".join((kind, "pair" if pair else "tiny", recipe, *["measured"] * measured))
    return made(name, lambda out: dq.quantize(source, recipe, out, backend="torch", **given))


def traces(kind: str, *, prompts: int = 12, max_new_tokens: int = 48) -> Path:
    """Traces of a shipped pair's first prompts, recorded beside its target."""

    def make(out: Path) -> None:
        pair, asked = PAIRS / kind, out.with_name(f"{out.name}.jsonl")
        lines = (pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines(True)
        asked.write_text("".join(lines[:prompts]), encoding="utf-8")
        dq.record(pair / "target", asked, out, draft=pair / "draft", max_new_tokens=max_new_tokens)

    return made(f"{kind}-traces-{prompts}-{max_new_tokens}", make)


def made(name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name: as it was made before, or made now by `make(folder)`."""
    place = _corpus() / name
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=_corpus(), prefix=".") as scratch:
            with warnings.catch_warnings(action="ignore", category=dq.DraftQuantWarning):
                make(Path(scratch) / name)
            try:
                (Path(scratch) / name).rename(place)
            except OSError:
                if not place.exists():  # else the other worker was first
                    raise
    return place


@functools.cache
def _corpus() -> Path:
    """build/corpus/DIGEST; what other digests made is deleted."""
    digest = hashlib.sha256()
    for package in ("torch", "transformers"):
        digest.update(importlib.metadata.version(package).encode())
    here, made_by = Path(__file__).parent, ("ti[en]*.py", "[br]*_pair*.py")
    builders = sorted(path for pattern in made_by for path in here.glob(pattern))
    product = [path for folder in _PRODUCT for path in sorted((ROOT / folder).rglob("*.*"))]
    for path in (Path(__file__), *builders, *product):
        if path.suffix in (".py", ".toml", ".yaml"):
            digest.update(path.read_bytes())
    corpora = os.environ.get("DRAFTQUANT_CORPORA", ROOT / "build" / "corpus")
    corpus = Path(corpora) / digest.hexdigest()[:16]
    corpus.mkdir(parents=True, exist_ok=True)
    for old in corpus.parent.iterdir():
        if old != corpus:
            shutil.rmtree(old, ignore_errors=True)
    return corpus
