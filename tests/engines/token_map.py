"""What SGLang's own draft workers propose under `--speculative-token-map`: `token_map.json`.

Usage: `.venv/bin/python tests/engines/token_map.py .venv-engines/bin/python`. The file is written
by `quantize/vocabulary/token_map.py`; each draft is loaded by SGLang's loader, and the worker's own
`init_token_map` and `init_lm_head` share a target's tables with it. `test_token_map.py` holds the
answers against the head of which only the listed rows are kept.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
OUT = HERE / "token_map.json"
sys.path[:0] = [str(HERE), str(HERE.parent)]

VOCAB, HIDDEN = 96, 64
IDS = tuple(range(1, VOCAB, 3))
"""The target ids of the map."""
EAGLE1 = {"architectures": ["LlamaForCausalLMEagle"]}


class Asked(NamedTuple):
    """A draft under a token map.

    Attributes:
        build: function of tests/tiny_*.py. arguments: its own. algorithm: as the server is told.
        tp: GPUs.
    """

    build: str
    arguments: Mapping[str, Any]
    algorithm: str
    tp: int = 1


CASES: Mapping[str, Asked] = {
    "EAGLE-1": Asked("tiny_eagle1", {"fc_bias": True, "config": EAGLE1}, "EAGLE"),
    "EAGLE-1 on 2 GPUs": Asked("tiny_eagle1", {"fc_bias": True, "config": EAGLE1}, "EAGLE", 2),
    "EAGLE-3": Asked("tiny_eagle3_llama", {"pruned_vocabulary": True}, "EAGLE3"),
    "language model": Asked("tiny_language_model", {}, "STANDALONE"),
    "MiMo MTP": Asked("tiny_mimo_mtp", {"config": {"model_type": "qwen2"}}, "NEXTN"),
}


def builders() -> Mapping[str, Callable[..., Path]]:
    """The functions that `Asked.build` names."""
    from tiny import tiny_eagle3_llama
    from tiny_llama import tiny_eagle1, tiny_language_model
    from tiny_mtp import tiny_mimo_mtp

    found = (tiny_eagle1, tiny_eagle3_llama, tiny_language_model, tiny_mimo_mtp)
    return {function.__name__: function for function in found}


def write_case(folder: Path, name: str) -> Path:
    """The draft of a case; its target's config and the token map stand beside it."""
    from draftquant.quantize.vocabulary.token_map import write_token_map

    folder.mkdir()
    asked = CASES[name]
    draft = builders()[asked.build](folder / "draft", **asked.arguments)
    (folder / "target").mkdir()
    config = json.dumps({"num_hidden_layers": 8})
    (folder / "target" / "config.json").write_text(config, encoding="utf-8")
    write_token_map(folder / "map.pt", IDS, vocab_size=VOCAB)
    return draft


def answered(folder: Path, name: str) -> dict[str, object]:
    """Proposals without and with the map, or SGLang's error with it."""
    import sglang_loader
    import sglang_platform
    from proposals import sglang_proposals

    sglang_platform.install("sm90")
    asked = CASES[name]
    subject = sglang_loader.subject(folder / "draft", folder / "target", asked.tp, 0)

    def proposed(token_map: str | None) -> object:
        model = subject.build()
        subject.load_folder(model)
        try:
            return sglang_proposals(model, asked.algorithm, token_map)
        except Exception as exc:  # noqa: BLE001  whatever the engine raises is its answer
            return f"{type(exc).__name__}: {exc}"

    return {"without": proposed(None), "with": proposed(str(folder / "map.pt"))}


def main() -> int:
    """See the module; without the engines' interpreter it answers for one folder."""
    if len(sys.argv) > 2:
        print(json.dumps(answered(Path(sys.argv[1]), sys.argv[2])))
        return 0
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, name in enumerate(CASES):
            folder = Path(temporary) / str(number)
            write_case(folder, name)
            command = [sys.argv[1], __file__, str(folder), name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
    rows = (f"{json.dumps(name)}: {json.dumps(said)}" for name, said in found.items())
    OUT.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
