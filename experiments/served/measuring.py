"""Measure a real vLLM server, and hold its rounds against replay's, prompt by prompt.

Usage: `.venv/bin/python experiments/served/measuring.py --python .venv-served/bin/python`.

Exit status 1: rounds differ where the draft's choice was clear; metrics of requests and counters
of the server tell different rounds; or a measurement is not whole after its server was killed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

import torch  # noqa: E402
from draftquant.calibration.traces.trace_folder import TraceFolder  # noqa: E402
from draftquant.quantize.stored.loading import load_draft  # noqa: E402
from draftquant.validate.measure.measurement import Measurement  # noqa: E402
from draftquant.validate.measure.measurement_file import read_measurement  # noqa: E402
from served.drafts import MAX_NEW_TOKENS, SERVED_PAIRS, Pair, record_by_engine  # noqa: E402
from served.every_position import NEAR, every_position, noise  # noqa: E402
from served.recording import PORT, end, started, wait_until_healthy  # noqa: E402
from served.rounds import Rounds, acceptance_length, compare  # noqa: E402

DETAILED = ("--per-request-spec-decode-metrics", "detailed")


class Measurer:
    """`draftquant measure` of one pair's BF16 draft, served by the engine of an environment."""

    def __init__(self, python: Path, pair: Pair, work: Path) -> None:
        self._python = python
        self._pair = pair
        self._work = work
        self.prompts = pair.write_prompts(work / "prompts.jsonl")

    @contextmanager
    def serving(self, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
        """A server, up to the end of the block."""
        speculative = {
            "method": self._pair.method,
            "model": str(self._pair.folder / "draft"),
            "num_speculative_tokens": self._pair.num_draft_tokens,
        }
        command = [
            *(str(self._python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._pair.folder / "target"), "--port", str(PORT)),
            *("--speculative-config", json.dumps(speculative), "--enforce-eager"),
            *("--max-model-len", "512", "--max-num-seqs", "16", "--no-enable-prefix-caching"),
            *options,
        ]
        path = self._work / "server.log"
        with path.open("wb") as log:
            server = started(command, log)
        try:
            wait_until_healthy(server, path)
            yield server
        finally:
            end(server)

    def out(self, name: str) -> Path:
        """Of a measurement."""
        return self._work / name

    def begin(self, name: str, *options: str) -> "subprocess.Popen[str]":
        """One measurement, in a process of its own."""
        command = [
            *(sys.executable, "-m", "draftquant.scripts.cli", "measure", "--engine", "vllm"),
            *("--server", f"http://127.0.0.1:{PORT}", "--prompts", str(self.prompts)),
            *("--draft", str(self._pair.folder / "draft"), "--out", str(self.out(name))),
            *("--max-new-tokens", str(MAX_NEW_TOKENS), "--attempts", "3", *options),
        ]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def measure(self, name: str, *options: str) -> Measurement:
        """One measurement, whole.

        Raises:
            RuntimeError: it failed; the message has what it said.
        """
        process = self.begin(name, *options)
        said, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"measure ended with {process.returncode}:\n{said}")
        print(said, flush=True)
        return read_measurement(self.out(name))


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True, help="of the engine's environment")
    parser.add_argument("--work", type=Path, help="folder to keep traces and measurements in")
    options = parser.parse_args()
    pair = SERVED_PAIRS[0]
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        measurer = Measurer(options.python, pair, work)
        failed = [*_check(measurer, pair, work, options.python)]
    for problem in failed:
        print(problem)
    return 1 if failed else 0


def _check(measurer: Measurer, pair: Pair, work: Path, python: Path) -> Iterator[str]:
    with measurer.serving(*DETAILED) as server:
        told = measurer.measure("told", "--top-logprobs", "2", "--warm-up", "4")
        alone = measurer.measure("alone", "--concurrency", "1")
        yield from _killed(measurer, server)
    with measurer.serving(*DETAILED):
        resumed = measurer.measure("resumed", "--max-requests-per-second", "4")
        if [r.id for r in resumed.records] != [r.id for r in told.records]:
            yield "a measurement whose server was killed has other prompts"
    with measurer.serving():
        counted = measurer.measure("counted")
    for one, other in zip(alone.records, counted.records, strict=True):
        if one.token_ids == other.token_ids and one.histogram != other.histogram:
            yield f"{one.id}: told {one.histogram}, counted {other.histogram}"
    for name, measurement in (("8 at a time", told), ("one at a time", alone)):
        found = _beside_replay(measurement, pair, measurer.prompts, work / "traces", python)
        print(
            f"{name}: acceptance length {acceptance_length(found.served):.4f}, replayed"
            f" {acceptance_length(found.replayed):.4f}; of {len(found.compared)} compared rounds"
            f" {found.num_equal} are equal and {found.num_near_ties} near ties;"
            f" {found.num_same_text} of {found.num_prompts} texts are those without a draft",
            flush=True,
        )
        differing = len(found.compared) - found.num_equal
        if not found.compared or differing > found.num_near_ties:
            yield f"{name}: {differing} rounds differ, {found.num_near_ties} of them at near ties"


def _killed(measurer: Measurer, server: "subprocess.Popen[bytes]") -> Iterator[str]:
    """A measurement whose server is killed in the middle."""
    client = measurer.begin("resumed", "--max-requests-per-second", "4")
    kept = measurer.out("resumed.measuring")
    while client.poll() is None and (not kept.exists() or kept.read_bytes().count(b"\n") < 5):
        time.sleep(0.02)
    end(server)
    said, _ = client.communicate()
    if client.returncode != 2 or "what was measured is kept" not in said:
        yield f"a server that is killed: {client.returncode}, {said}"


def _beside_replay(
    measurement: Measurement, pair: Pair, prompts: Path, traces: Path, python: Path
) -> Rounds:
    """Its rounds, beside those of replay on what the engine records without a draft."""
    if not traces.exists():
        record_by_engine(python, pair, prompts, traces)
    folder = TraceFolder.open(traces)
    texts = [*folder]
    draft = pair.folder / "draft"
    as_served, exact = (
        [every_position(loaded, folder, text, pair.num_draft_tokens) for text in texts]
        for loaded in (
            load_draft(draft, dtype=dtype, compact=True, shared=folder.tables(None))
            for dtype in (torch.bfloat16, torch.float32)
        )
    )
    records = measurement.records
    assert [record.id for record in records] == [text.id for text in texts]
    return compare(
        [record.token_ids for record in records],
        [record.accepted or () for record in records],
        texts,
        as_served,
        pair.num_draft_tokens,
        near=NEAR * noise(as_served, exact),
    )


if __name__ == "__main__":
    sys.exit(main())
