"""Small folders of every class of drafts that vLLM 0.33 and SGLang 0.5.23 load and no family reads.

`draft_classes.toml` has their tensors, with the roles that the engine's source gives them.
"""

import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tiny import Stored, store, write_tensors

TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
CLASSES: Mapping[str, Mapping[str, Any]] = {**TABLE["vllm"], **TABLE["sglang"]}
SIZES = {"H": 128, "I": 256, "V": 256, "D": 128, "R": 128, "E": 2}
_NO_ROLES = {"source", "config", "at", "blocks", "refused"}


def tensors(name: str) -> Iterator[tuple[str, str, tuple[int, ...], str]]:
    """Name, role, shape and dtype of each tensor of a class."""
    row = CLASSES[name]
    for part in (row, *(TABLE["blocks"][block] for block in row.get("blocks", ()))):
        for role in part.keys() - _NO_ROLES:
            for said in part[role]:
                pattern, shape, *dtype = said.replace("@", row.get("at", "")).split()
                for one in _spelled_out(pattern):
                    yield one, role, tuple(map(_size, shape.split(","))), "I64" if dtype else "BF16"


def write(name: str, folder: Path) -> Path:
    """The folder of a class, with random weights."""
    rng = np.random.default_rng(0)
    stored: dict[str, Stored] = {
        tensor: Stored(dtype, shape, np.zeros(shape, np.int64).tobytes())
        if dtype == "I64"
        else store(rng.normal(0, 0.05, shape), dtype)
        for tensor, _, shape, dtype in sorted(tensors(name))
    }
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
    config = {"architectures": [name], "num_attention_heads": 2, **sizes, **CLASSES[name]["config"]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tensors(folder, stored)
    return folder


def _spelled_out(pattern: str) -> Iterator[str]:
    parts = re.split(r"\{(.*?)\}", pattern)
    for chosen in itertools.product(*(p.split(",") for p in parts[1::2])):
        yield "".join(itertools.chain(*itertools.zip_longest(parts[::2], chosen, fillvalue="")))


def _size(said: str) -> int:
    if said.isdigit():
        return int(said)
    return int(said[:-1] or 1) * SIZES[said[-1]]
