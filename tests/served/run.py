"""Serve every draft with the real vLLM on this CPU; write results.json, RESULTS.md and the README.

Usage: `.venv/bin/python tests/served/run.py --python .venv-served/bin/python`.

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
sys.path.insert(0, str(HERE))

from draftquant.calibration.traces import TraceFolder  # noqa: E402
from draftquant.quantize.stored.loading import load_draft  # noqa: E402
from drafts import MAX_NEW_TOKENS, SERVED_PAIRS, Draft, Pair, drafts, record  # noqa: E402
from results import Served, write_results  # noqa: E402
from rounds import acceptance_length, compare, replayed_by_position  # noqa: E402

MAX_DIFFERENCE = 0.02
"""Of acceptance lengths over the same rounds, relative: they part at near ties only."""


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True, help="of the engine's environment")
    parser.add_argument("--work", type=Path, help="folder to keep drafts and traces in")
    parser.add_argument("--jobs", type=int, default=2, help="engines at a time")
    parser.add_argument("--only", nargs="*", metavar="DRAFT", help="these drafts; writes no table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        served = [
            each
            for pair in SERVED_PAIRS
            for each in _serve_pair(options.python, pair, work, options.only, options.jobs)
        ]
    if options.only is None:
        write_results(served)
    far = [each for each in served if each.difference > MAX_DIFFERENCE]
    for each in far:
        print(f"{each.family} {each.draft}: {each.difference:.2%} away from replay")
    return 1 if far else 0


def _serve_pair(
    python: Path, pair: Pair, work: Path, only: Sequence[str] | None, jobs: int
) -> Iterator[Served]:
    folder = work / pair.family
    folder.mkdir(parents=True)
    prompts = pair.write_prompts(folder / "prompts.jsonl")
    traces = record(pair, prompts, folder / "traces", "--dtype", "bfloat16")
    calibration = record(pair, pair.folder / "calibration.jsonl", folder / "calibration")
    alone = _ask(python, pair, prompts)["token_ids"]

    def serve(named: tuple[str, Draft]) -> Served:
        name, draft = named
        out = folder / name
        answer = _ask(python, pair, prompts, out, *(["--plugin"] if draft.plugin else []))
        return _served(pair, name, answer, out, traces, alone)

    chosen = {
        name: draft
        for name, draft in drafts(pair, calibration).items()
        if only is None or name in only
    }
    for name, draft in chosen.items():
        draft.make(folder / name)
    with ThreadPoolExecutor(jobs) as pool:
        for served in pool.map(serve, chosen.items()):
            print(json.dumps(dataclasses.asdict(served)), file=sys.stderr, flush=True)
            yield served


def _served(
    pair: Pair,
    name: str,
    answer: dict[str, Any],
    draft: Path,
    traces: TraceFolder,
    alone: Sequence[Sequence[int]],
) -> Served:
    """What the engine's answer says, beside replay."""
    if "error" in answer:
        return Served(family=pair.family, draft=name, error=answer["error"])
    texts, k = answer["token_ids"], pair.num_draft_tokens
    by_position = replayed_by_position(load_draft(draft, shared=traces.tables()), traces, k)
    found = compare(texts, answer["accepted"], traces, by_position, k)
    return Served(
        family=pair.family,
        draft=name,
        version=answer["vllm"],
        acceptance_length=acceptance_length(found.served),
        replayed=acceptance_length(found.replayed),
        num_rounds=len(found.served),
        num_compared=len(found.compared),
        num_equal=found.num_equal,
        served_where_compared=acceptance_length([served for served, _ in found.compared]),
        replayed_where_compared=acceptance_length([replayed for _, replayed in found.compared]),
        num_same_text=found.num_same_text,
        num_same_as_alone=sum(map(list.__eq__, texts, alone)),
        num_prompts=found.num_prompts,
    )


def _ask(
    python: Path, pair: Pair, prompts: Path, draft: Path | None = None, *options: str
) -> dict[str, Any]:
    """The engine's answer, in a process of its own; without a draft the target decodes alone."""
    drafting = [str(draft), "--method", pair.method, "-k", str(pair.num_draft_tokens), *options]
    command = [
        *(str(python), str(HERE / "serve.py"), str(pair.folder / "target"), str(prompts)),
        *(drafting if draft else ()),
        *("--max-new-tokens", str(MAX_NEW_TOKENS)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        raise RuntimeError(f"the engine ended without an answer:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    sys.exit(main())
