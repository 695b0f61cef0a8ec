"""The four commands that publish a folder, on small inputs, each run in a process of its own.

What the tests of kills and of failing disks share. A run is a fork of this process, which has
imported everything and computed nothing: it starts at once.
"""

import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from draftquant.scripts.cli import main

FAILED = 70  # exit code of a run that raised what no user should see
_NUM_PROMPTS, _PROMPT_LENGTH, _VOCABULARY = 8, 12, 64
_TARGET_WIDTH, _TARGET_LAYERS = 64, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """One command: `argv` without `--out`; `last` is the file that makes `out` what it is."""

    name: str
    argv: tuple[str, ...]
    source: Path
    out: Path
    last: str

    def start(self, prepare: Callable[[], None], finish: Callable[[], None] = lambda: None) -> int:
        """Fork a run between these two, in the new process; returns its process id."""

        def run() -> int:
            prepare()
            code = main([*self.argv, "--out", str(self.out)])
            finish()
            return code

        return fork(run)

    def remove(self) -> None:
        """Empty the parent of `out`."""
        shutil.rmtree(self.out.parent)
        self.out.parent.mkdir()


def fork(run: Callable[[], int]) -> int:
    """Run a function in a new process with Python's own signal handlers; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else FAILED
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - a fork must never return into its parent's work
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    """Wait for a run; a killed one has minus the number of the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def make_publishers(work: Path, *, divide: int, log: Path, new_tokens: int) -> list[Publisher]:
    """Write the inputs below `work`, a new folder; the draft is so many times smaller."""
    _import_all()
    work.mkdir()
    draft, packed, target = (work / n for n in ("draft", "packed", "target"))
    prompts = work / "prompts.jsonl"

    def make() -> int:
        _quietly(log)
        _write_draft(draft, divide)
        _write_target(target, prompts)
        arguments = ["--recipe", "fp8-ptpc", "--backend", "torch", "--out", str(packed)]
        return main(["quantize", str(draft), *arguments])

    if exit_code(fork(make)):
        raise RuntimeError(f"the inputs could not be made; see {log}")
    runs = {
        "quantize": (draft, ("quantize", str(draft), "--recipe", "int4-channel")),
        "dequantize": (packed, ("dequantize", str(packed))),
        "record": (target, ("record", "--target", str(target), "--prompts", str(prompts),
                            "--tables", "--aux-layers", "1,2,4",
                            "--max-new-tokens", str(new_tokens))),
    }  # fmt: skip
    publishers = []
    for name, (source, argv) in runs.items():
        out = work / name / "out"
        out.parent.mkdir()
        last = "trace.json" if name == "record" else "config.json"
        publishers.append(Publisher(name=name, argv=argv, source=source, out=out, last=last))
    return publishers


def contents(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def quiet(log: Path) -> Callable[[], None]:
    """Sends what a process prints into a file."""
    return lambda: _quietly(log)


def _import_all() -> None:
    from draftquant.calibration.recording import record_traces  # noqa: F401
    from draftquant.quantize.making import quantize_draft  # noqa: F401
    from draftquant.scripts.verbs import check  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401 - loads torch and itself


def _quietly(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def _write_draft(folder: Path, divide: int) -> None:
    from draftquant.scripts.dev.real_shapes.generate import write_real_shape_draft

    write_real_shape_draft(folder, divide=divide)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a side file\n" * 4096, encoding="utf-8")


def _write_target(folder: Path, prompts: Path) -> None:
    """A target with random weights, and prompts of token ids for it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=_TARGET_WIDTH,
        intermediate_size=2 * _TARGET_WIDTH,
        num_hidden_layers=_TARGET_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=_VOCABULARY,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    lines = []
    for number in range(_NUM_PROMPTS):
        ids = torch.randint(_VOCABULARY, (_PROMPT_LENGTH,)).tolist()
        lines.append(json.dumps({"id": f"prompt-{number}", "token_ids": ids}) + "\n")
    prompts.write_text("".join(lines), encoding="utf-8")
