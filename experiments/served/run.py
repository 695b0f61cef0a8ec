"""Serve every draft with the real vLLM on this CPU; write results.json and its tables.

Usage: `.venv/bin/python experiments/served/run.py --python .venv-served/bin/python`.

Exit status 1: an acceptance length of the engine is further from replay's than `MAX_DIFFERENCE`.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

from served.beside_replay import FP8, beside_replay  # noqa: E402
from served.cpu import (  # noqa: E402
    NOTE,
    has_int4_product,
    needs_it,
)
from served.drafts import (  # noqa: E402
    MAX_NEW_TOKENS,
    SERVED_PAIRS,
    Draft,
    Pair,
    dequantized,
    draft_names,
    drafts,
    record,
    record_by_engine,
)
from served.results import Served, read_results, write_results, write_tables  # noqa: E402

CPUINFO = Path("/proc/cpuinfo")
MAX_DIFFERENCE = 0.03
"""Of acceptance lengths over the same rounds, relative: they part at near ties only, of which each
moves a round by up to K tokens."""


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, help="of the engine's environment")
    parser.add_argument("--tables", action="store_true", help="only write the tables anew")
    parser.add_argument("--work", type=Path, help="folder to keep drafts and traces in")
    parser.add_argument("--jobs", type=int, default=2, help="engines at a time")
    parser.add_argument("--only", nargs="*", metavar="DRAFT", help="these; others' rows stay")
    parser.add_argument("--family", nargs="*", metavar="F", help="these pairs; others' rows stay")
    options = parser.parse_args()
    if options.tables:
        write_tables(read_results())
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        served = [
            each
            for pair in SERVED_PAIRS
            if options.family is None or pair.family in options.family
            for each in _serve_pair(options.python, pair, work, options.only, options.jobs)
        ]
    again = {(each.family, each.draft) for each in served}
    kept = [each for each in read_results() if (each.family, each.draft) not in again]
    pairs, names = [pair.family for pair in SERVED_PAIRS], draft_names()
    found = [each for each in [*kept, *served] if each.draft in names]
    found.sort(key=lambda each: (pairs.index(each.family), names.index(each.draft)))
    write_results(found)
    far = [each for each in served if each.difference > MAX_DIFFERENCE]
    for each in far:
        print(f"{each.family} {each.draft}: {each.difference:.2%} away from replay")
    return 1 if far else 0


def _serve_pair(
    python: Path, pair: Pair, work: Path, only: Sequence[str] | None, jobs: int
) -> Iterator[Served]:
    """The engine on every draft of a pair, and replay of the text that it wrote."""
    folder = work / pair.family
    folder.mkdir(parents=True)
    prompts = pair.write_prompts(folder / "prompts.jsonl")
    calibration = record(pair, pair.folder / "calibration.jsonl", folder / "calibration")
    traces = record_by_engine(python, pair, prompts, folder / "traces")

    def serve(named: tuple[str, Draft]) -> Served:
        name, draft = named
        options = ["--plugin"] if draft.plugin else []
        options += ["--kv-cache-dtype", FP8] if draft.fp8_cache else []
        answer = _ask(python, pair, prompts, plain.get(name, folder / name), *options)
        if "error" in answer:
            return Served(family=pair.family, draft=name, error=answer["error"])
        own = folder / name, traces, answer["token_ids"], answer["accepted"]
        found = beside_replay(*own, pair.num_draft_tokens, FP8 if draft.fp8_cache else None)
        done = Served.of(found, family=pair.family, draft=name, version=answer["vllm"])
        return dataclasses.replace(done, dequantized=name in plain)

    chosen = {n: d for n, d in drafts(pair, calibration).items() if only is None or n in only}
    plain: dict[str, Path] = {}
    lacks_int4 = not has_int4_product(CPUINFO.read_text(encoding="utf-8"))
    for name, draft in chosen.items():
        draft.make(folder / name)
        if lacks_int4 and needs_it(folder / name):
            plain[name] = dequantized(folder / name, folder / f"{name} dequantized")
    if plain:
        print(NOTE, file=sys.stderr)
    with ThreadPoolExecutor(jobs) as pool:
        for served in pool.map(serve, chosen.items()):
            print(json.dumps(dataclasses.asdict(served)), file=sys.stderr, flush=True)
            yield served


def _ask(python: Path, pair: Pair, prompts: Path, draft: Path, *options: str) -> dict[str, Any]:
    """The engine's answer, in a process of its own."""
    command = [
        *(str(python), str(HERE / "serve.py"), str(pair.folder / "target"), str(prompts)),
        *(str(draft), "--method", pair.method, "-k", str(pair.num_draft_tokens), *options),
        *("--max-new-tokens", str(MAX_NEW_TOKENS)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        raise RuntimeError(f"the engine ended without an answer:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    sys.exit(main())
