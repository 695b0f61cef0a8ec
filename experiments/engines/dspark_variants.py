"""DSpark drafts as trainers and hands spell them, and what the engines' own loaders say: a table.

Usage: `python dspark_variants.py --python VENV_ENGINES/bin/python` writes dspark_variants.json; see
run.py for the environment. The drafts are unquantized, on sm90 in one shard.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "tests"))
from tiny_dspark import tiny_dspark  # noqa: E402

TABLE = HERE / "dspark_variants.json"
_SIZES: dict[str, Any] = {
    "hidden": 256,
    "intermediate": 512,
    "vocab": 512,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "num_layers": 2,
    "rank": 128,
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "flat-vanilla": {},
    "flat-gated": {"markov_head": "gated"},
    "flat-rnn": {"markov_head": "rnn"},
    "specforge": {"layout": "specforge"},
    "logit_head": {"layout": "logit_head"},
    "modelopt": {"layout": "modelopt"},
    "noconf": {"confidence": False},
    "noconf-false": {"confidence": False, "config": {"enable_confidence_head": False}},
    "conf-but-false": {"config": {"enable_confidence_head": False}},
    "no-conf-markov": {"config": {"confidence_head_with_markov": None}},
    "no-headtype": {"config": {"markov_head_type": None}},
    "pruned": {"pruned_vocabulary": True},
    "fillin": {"from_anchor": False},
    "dsparkname": {"config": {"architectures": ["DSparkDraftModel"]}},
    "ling": {"config": {"architectures": ["LingDSparkModel"]}},
    "draft_model": {"spelling": "draft_model"},
}
"""Name -> arguments of `tiny_dspark`; a key of `config` that is None is left out."""


def write_variant(folder: Path, name: str) -> Path:
    """Write one of `VARIANTS`."""
    arguments = dict(VARIANTS[name])
    changes = {"torch_dtype": "bfloat16", **arguments.pop("config", {})}
    tiny_dspark(folder, **_SIZES, **arguments, config=changes)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in changes or value is not None}
    (folder / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return folder


def _asked(python: Path, engine: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> verdict and error of an engine's loader."""
    script = str(HERE / f"{engine}_loader.py")
    drafts = [str(folder / name) for name in VARIANTS]
    options = ["--arch", "sm90", "--tp", "1", "--target", str(folder / "target")]
    command = [str(python), script, *options, *drafts]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {said["draft"]: {key: said[key] for key in ("verdict", "error")} for said in lines}


def main() -> None:
    """Write the table."""
    from cases import write_target

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of the engines' environment")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_target(folder / "target")
        for name in VARIANTS:
            write_variant(folder / name, name)
        found = {engine: _asked(python, engine, folder) for engine in ("vllm", "sglang")}
    TABLE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
