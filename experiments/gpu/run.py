"""Everything that runs on a GPU, beside the CPU. `experiments/run gpu`.

Each part is a process of its own: one that fails or takes too long costs only its own rows. Exit
status: 0 all is as it must be; 1 something is not, or a part failed; 2 there is no such device.
"""

import argparse
import importlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

import torch  # noqa: E402
from draftquant.calibration.passes.memory import resolve_device  # noqa: E402
from draftquant.recipes.errors import DeviceError  # noqa: E402
from gpu.rows import Row, Run, markdown, read_rows, write_row  # noqa: E402

RESULTS = "RESULTS.md"
SECONDS = 570.0
"""Of the whole run: less than ten minutes."""
PARTS = {"encoders": ("same", 60), "verbs": ("same", 180)}
"""Function -> its module, and the seconds that it may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="experiments/run gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:I, or cpu to try the code")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=HERE, help=f"folder for {RESULTS}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    try:
        device = resolve_device(asked.device)
    except DeviceError as exc:
        print(f"no CUDA device: nothing was run ({exc})", file=sys.stderr)
        return 2
    if asked.part:
        part = getattr(importlib.import_module(f"gpu.{PARTS[asked.part][0]}"), asked.part)
        for row in part(Run(device=device, tiny=asked.tiny, work=asked.out)):
            write_row(asked.out / "rows.jsonl", row)
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = _run_parts(asked, time.monotonic() + SECONDS)
    text = _heading(device) + markdown(rows)
    (asked.out / RESULTS).write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(row.ok is False for row in rows) else 0


def _run_parts(asked: argparse.Namespace, end: float) -> list[Row]:
    rows = []
    for name in asked.only:
        seconds = min(PARTS[name][1], end - time.monotonic())
        with tempfile.TemporaryDirectory(prefix="draftquant-gpu-") as work:
            started = time.monotonic()
            problem = _problem_of(name, asked, Path(work), seconds)
            rows += read_rows(Path(work) / "rows.jsonl")
        took = f"{time.monotonic() - started:.0f}"
        cells = {"part": name, "seconds": took, "ended": problem or "well"}
        rows.append(Row(table="Parts of this run", cells=cells, ok=problem is None))
        print(f"{name}: {problem or 'done'}, {took} s", file=sys.stderr, flush=True)
    return rows


def _problem_of(name: str, asked: argparse.Namespace, work: Path, seconds: float) -> str | None:
    """What kept a part from its end; None where nothing did."""
    if seconds < 1:
        return "no time was left"
    command = [sys.executable, __file__, "--part", name, "--device", asked.device]
    command += ["--out", str(work), *(["--tiny"] if asked.tiny else [])]
    try:
        done = subprocess.run(
            command, stderr=subprocess.PIPE, stdout=sys.stderr, text=True, encoding="utf-8",
            errors="replace", timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"took longer than {seconds:.0f} s"
    if done.returncode == 0:
        return None
    print(done.stderr, file=sys.stderr)
    last = done.stderr.strip().splitlines() or [""]
    return f"failed with exit status {done.returncode}: {last[-1]}".replace("|", "/")


def _heading(device: torch.device) -> str:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return (
        "# What a GPU computes\n\nWritten by `experiments/run gpu`. Device:"
        f" {name}. PyTorch {torch.__version__}, Python {platform.python_version()}.\n\n"
    )


if __name__ == "__main__":
    sys.exit(main())
