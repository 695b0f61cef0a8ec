"""Make folders with other tools, ask both engines, and hold `draftquant check` against them.

Writes foreign.json, FOREIGN.md and foreign_sample.json; `foreign/` makes the folders.

Exit status 1: `check` is wrong somewhere, or says UNKNOWN of 5 % of the answers or more.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAKERS = HERE / "foreign"
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(MAKERS)]  # tiny.py and its kin

import asking  # noqa: E402
from draftquant.quantize.engines.engine_check import check_draft  # noqa: E402
from drafts import write_drafts  # noqa: E402
from foreign_results import Answer, is_good_enough, table, write_results, write_sample  # noqa: E402

IN_TOOLS, IN_OURS = (
    ("llmcompressor", "oneshot"),
    ("compressed_tensors", "modelopt", "quark"),
)
"""Makers, by the environment that their tool is in."""
PLATFORMS = {
    ("vllm", "sm80"): 3,
    ("vllm", "sm90"): 1,
    ("vllm", "sm100"): 2,
    ("vllm", "gfx942"): 2,
    ("sglang", "sm90"): 1,
    ("sglang", "sm100"): 3,
    ("sglang", "gfx942"): 1,
    ("sglang", "gfx950"): 2,
}
"""Engine and GPU -> every how many folders are asked for."""
SHARDS = {1: 1, 2: 4, 4: 6, 8: 8}
"""Number of shards -> every how many of those are asked for in so many."""


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, help="folder to keep folders and raw output in")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the result table")
    parser.add_argument("--turn", type=int, default=0, help="which drafts each scheme is put on")
    parser.add_argument("--reuse", action="store_true", help="the folders that --work holds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if not arguments.reuse:
            _make(work, Path(os.environ["TOOLS_PYTHON"]), arguments.turn)
        folders = sorted(path.parent for path in work.glob("drafts/*/*--*/config.json"))
        answers = []
        for (engine, arch), every in PLATFORMS.items():
            platform = f"{engine}-{arch}"
            _ask(work, folders[len(platform) % every :: every], engine, arch)
            answers += _compared(work, platform)
        write_results(arguments.out, len(folders), answers)
        write_sample(
            arguments.out / "foreign_sample.json",
            work / "drafts",
            [answer.outcome for answer in answers],
        )
    print(table(answers))
    return 0 if is_good_enough(answers) else 1


def _make(work: Path, tools: Path, turn: int) -> None:
    """Every tool in its own process; what it refuses to quantize is left out."""
    write_drafts(work / "drafts")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    bins = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # Quark wants ninja
    for python, makers in ((tools, IN_TOOLS), (Path(sys.executable), IN_OURS)):
        for maker in makers:
            print(f"making folders with {maker}", file=sys.stderr)
            script, result = MAKERS / f"by_{maker}.py", work / f"{maker}.jsonl"
            with (work / f"{maker}.log").open("w") as log:
                made = [str(work / "drafts"), str(result), str(turn)]
                subprocess.run(
                    [str(python), "-W", "ignore", str(script), *made],
                    check=True,
                    env=environment | {"PATH": bins},
                    stdout=log,
                    stderr=log,
                )


def _ask(work: Path, folders: Sequence[Path], engine: str, arch: str) -> None:
    """What one engine does on one GPU, in all numbers of shards; a file per number."""
    for tp, every in SHARDS.items():
        said = asking.loaded(engine, folders[tp % every :: every], arch=arch, tp=tp)
        lines = "".join(f"{json.dumps(outcome)}\n" for outcome in said)
        (work / f"{engine}-{arch}-tp{tp}.jsonl").write_text(lines, encoding="utf-8")


def _compared(work: Path, platform: str) -> Iterator[Answer]:
    """Each answer of an engine, and what `check` says of the same."""
    for path in sorted(work.glob(f"{platform}-tp*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            outcome = json.loads(line)
            said = check_draft(
                work / "drafts" / outcome["draft"],
                engine=outcome["engine"],
                version=outcome["version"],
                arch=outcome["arch"],
                tp=outcome["tp"],
                target_layers=asking.NUM_TARGET_LAYERS,
            )
            yield Answer(outcome, said.verdict, said.error)


if __name__ == "__main__":
    sys.exit(main())
