"""How experiments ask an engine: its loaders in its own environment, all folders in one process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests"), str(HERE / "foreign")]

from tiny_mla import MODELOPT_EXTRAS  # noqa: E402

TARGET_FOLDER = "target"
NUM_TARGET_LAYERS = 8
Outcome = dict[str, Any]


def python() -> str:
    """The interpreter of the engines' environment, as `experiments/run` names it."""
    return os.environ.get("ENGINES_PYTHON", str(HERE.parents[1] / ".venv-engines/bin/python"))


def loaded(
    engine: str,
    folders: Sequence[Path],
    *,
    arch: str = "sm90",
    tp: int = 1,
    target: Path | None = None,
    log: Path | None = None,
) -> list[Outcome]:
    """What an engine's own loader says of each folder, as if there was such a GPU.

    Args:
        target: of all; None: "target" beside each; /layer: the MTP layers of the folders.
        log: for what it writes to standard error.
    """
    command = [python(), f"{engine}_loader.py", "--arch", arch, "--tp", str(tp)]
    command += ["--target", str(target)] if target else []
    done = subprocess.run([*command, *map(str, folders)], cwd=HERE, capture_output=True, text=True)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"{engine} {arch} tp{tp}: {len(said)} of {len(folders)} folders", file=sys.stderr)
    if log is not None:
        log.write_text(done.stderr, encoding="utf-8")
    if done.returncode or len(said) != len(folders):
        raise RuntimeError(f"{engine} on {arch} did not answer:\n{done.stderr[-4000:]}")
    return said


def write_table(file: Path, rows: Mapping[str, object]) -> None:
    """A JSON object with a line for each of its keys."""
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write_target(folder: Path, hidden: int = 256, vocab: int = 512) -> None:
    """A config.json of a target that drafts of all families fit: DeepSeek-V3's own."""
    heads, nope, rope, value = 4, 128, 64, 128
    config: Mapping[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "kv_lora_rank": 128, "max_position_embeddings": 2048, "num_attention_heads": heads,
        "num_hidden_layers": NUM_TARGET_LAYERS, "num_key_value_heads": heads, "q_lora_rank": 256,
        "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "v_head_dim": value, "vocab_size": vocab, **MODELOPT_EXTRAS, "head_dim": rope,
        "n_routed_experts": 8,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
