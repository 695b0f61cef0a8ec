"""Record the shipped targets with the real vLLM and with transformers; write RECORDED.md.

Usage: `.venv/bin/python experiments/served/recording.py --python .venv-served/bin/python`.

Exit status 1: a recording is not what it should be; the failed checks are printed.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

import torch  # noqa: E402
from draftquant.calibration.recording.decoding import Decoding, processed_logprobs  # noqa: E402
from draftquant.calibration.traces.trace_folder import TraceFolder  # noqa: E402
from served.drafts import ENGINE_ARGUMENTS, SERVED_PAIRS, Pair  # noqa: E402
from served.recorded import Compared, compare, compared_row, document  # noqa: E402
from served.serve import ENVIRONMENT  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

RESULTS = HERE / "RECORDED.md"
NUM_PROMPTS, MAX_NEW_TOKENS = 48, 64
FEW, MANY = 16, 96  # prompts, for what is no question of statistics, and for speed
MORE_TOKENS = 256  # of a prompt, for speed
PORT = 8817
ENGINE = ("--engine", "vllm")
MAX_RELATIVE = {"bfloat16": 0.02, "float32": 1e-4}
"""Of a layer's outputs; BF16 keeps 8 bits, and sums are taken in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One `draftquant record`.

    Attributes:
        seconds: of the whole command.
        megabytes: peak of the resident memory of its processes together.
    """

    traces: TraceFolder
    seconds: float
    megabytes: float


class Recorder:
    """`draftquant record` on one pair's target, by either interpreter."""

    def __init__(self, pair: Pair, work: Path, python: Path) -> None:
        self.pair = pair
        self.work = work
        self.engine = python
        work.mkdir(parents=True)
        lines = (
            (pair.folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        )
        for count in (FEW, NUM_PROMPTS, MANY):
            (work / f"{count}.jsonl").write_text("".join(lines[:count]), encoding="utf-8")

    def command(self, python: Path | str, count: int, out: str, *options: str) -> list[str]:
        """Of a recording of so many prompts."""
        folder = self.pair.folder
        return [
            *(str(python), "-m", "draftquant.scripts.cli", "record"),
            *("--target", str(folder / "target"), "--draft", str(folder / "draft"), "--tables"),
            *("--prompts", str(self.work / f"{count}.jsonl"), "--out", str(self.work / out)),
            *("--max-new-tokens", str(MAX_NEW_TOKENS), "--logprobs", *options),
        ]

    def offline(self, count: int, out: str, *options: str) -> Run:
        """By an engine of our own."""
        asked = (*ENGINE, *ENGINE_ARGUMENTS, *self.pair.recording)
        return self._run(self.command(self.engine, count, out, *asked, *options))

    def transformers(self, count: int, out: str, *options: str) -> Run:
        """By transformers, in this interpreter's environment."""
        return self._run(self.command(sys.executable, count, out, *options))

    def served(self, count: int, out: str, *options: str) -> Run:
        """By the server that `serving` has started."""
        url = ("--server", f"http://127.0.0.1:{PORT}", "--shared", str(self.shared))
        return self._run(self.command(sys.executable, count, out, *ENGINE, *url, *options))

    @property
    def shared(self) -> Path:
        """Folder for hidden states on their way."""
        folder = self.work / "shared"
        folder.mkdir(exist_ok=True)
        return folder

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[bytes]]:
        """A server, started with what the recorder prints."""
        asked = (*ENGINE, *ENGINE_ARGUMENTS, "--engine-arg", f"port={PORT}")
        more = ("--shared", str(self.shared), "--print-server-args")
        command = self.command(sys.executable, NUM_PROMPTS, "none", *asked, *more)
        printed = subprocess.run(command, capture_output=True, text=True, check=True)
        # `vllm serve` asks for the metadata of a package called vllm, which this one is not.
        serve = shlex.split(printed.stdout)[2:]
        module = (str(self.engine), "-m", "vllm.entrypoints.openai.api_server", "--model")
        with (self.work / "server.log").open("wb") as log:
            server = started([*module, *serve], log)
        try:
            wait_until_healthy(server, self.work / "server.log")
            yield server
        finally:
            end(server)

    def _run(self, command: Sequence[str]) -> Run:
        began, peak = time.perf_counter(), 0.0
        with (self.work / "record.log").open("wb") as log:
            process = started(command, log)
            while process.poll() is None:
                peak = max(peak, _resident_megabytes(process.pid))
                time.sleep(0.2)
        if process.returncode:
            said = (self.work / "record.log").read_text(encoding="utf-8")[-4000:]
            raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}:\n{said}")
        out = Path(command[command.index("--out") + 1])
        seconds = time.perf_counter() - began
        return Run(traces=TraceFolder.open(out), seconds=seconds, megabytes=peak)


def started(command: Sequence[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
    """In a session of its own."""
    environment = os.environ | ENVIRONMENT | {"VLLM_PLUGINS": ""}
    return subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, start_new_session=True
    )


def end(server: "subprocess.Popen[bytes]") -> None:
    """Kill a server with its workers."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True, help="of the engine's environment")
    parser.add_argument("--work", type=Path, help="folder to keep traces in")
    options = parser.parse_args()
    failed: list[str] = []
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        base = options.work or Path(temporary)
        for pair in SERVED_PAIRS:
            recorder = Recorder(pair, base / pair.family, options.python)
            for dtype in ("bfloat16", "float32"):
                found = _both(recorder, dtype)
                lines.append(compared_row(pair.family, dtype, found))
                failed += _check(pair, dtype, found)
                print(lines[-1], flush=True)
        recorder = Recorder(SERVED_PAIRS[0], base / "server", options.python)
        failed += _check_pieces(recorder)
        failed += _check_server(recorder)
        failed += _check_sampled(recorder)
        speed = _speed(recorder)
    RESULTS.write_text(
        document(
            lines, speed, few=FEW, many=MANY, gate=NUM_PROMPTS, new=MAX_NEW_TOKENS, more=MORE_TOKENS
        ),
        encoding="utf-8",
    )
    for problem in failed:
        print(problem)
    return 1 if failed else 0


def _both(recorder: Recorder, dtype: str) -> Compared:
    dtyped = ("--dtype", dtype)
    engine = recorder.offline(NUM_PROMPTS, f"vllm-{dtype}", *dtyped).traces
    reference = recorder.transformers(NUM_PROMPTS, f"transformers-{dtype}", *dtyped).traces
    return compare(engine, reference, recorder.pair.folder / "draft")


def _check(pair: Pair, dtype: str, found: Compared) -> Iterator[str]:
    for layer in found.layers:
        if layer.relative > MAX_RELATIVE[dtype]:
            yield f"{pair.family} {dtype}: layer {layer.layer} is {layer.relative:.2%} away"
    if found.num_equal < found.num_prompts / 4:
        yield f"{pair.family} {dtype}: {found.num_equal} of {found.num_prompts} texts are equal"
    one, other = found.acceptance_length
    if abs(one / other - 1) > 0.05:
        yield f"{pair.family} {dtype}: replay gives {one:.3f} and {other:.3f}"


def _check_pieces(recorder: Recorder) -> Iterator[str]:
    """Prompts that the engine reads in pieces have the same states."""
    dtyped = ("--dtype", "float32")
    pieces = (
        "--engine-arg",
        "enable_chunked_prefill=true",
        "--engine-arg",
        "max_num_batched_tokens=72",
    )
    one = recorder.offline(FEW, "pieces", *dtyped, *pieces).traces
    other = recorder.offline(
        FEW, "in-one", *dtyped, "--engine-arg", "enable_chunked_prefill=false"
    ).traces
    found = compare(one, other, recorder.pair.folder / "draft")
    if found.num_equal < FEW or any(layer.relative > 1e-5 for layer in found.layers):
        yield f"prompts read in pieces: {found}"


def _check_server(recorder: Recorder) -> Iterator[str]:
    """The server writes what the offline engine does, also where it dies and is started again."""
    offline = recorder.offline(FEW, "offline").traces
    with recorder.serving() as server:
        if recorder.served(FEW, "served").traces.sha256 != offline.sha256:
            yield "server and offline engine record different traces"
        out = recorder.work / "resumed"
        command = recorder.command(
            sys.executable, NUM_PROMPTS, "resumed", *ENGINE, "--batch-size", "4",
            "--server", f"http://127.0.0.1:{PORT}", "--shared", str(recorder.shared),
        )  # fmt: skip
        client = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        kept = out.with_name("resumed.recording")
        while client.poll() is None and len([*kept.glob("0*.json")]) < 5:
            time.sleep(0.05)
        end(server)
        _, said = client.communicate()
    count = len([*kept.glob("0*.json")])
    if client.returncode != 2 or "what was recorded is kept" not in said or out.exists():
        yield f"a server that dies: {client.returncode}, {said}"
    with recorder.serving():
        resumed = recorder.served(NUM_PROMPTS, "resumed", "--batch-size", "4").traces
        whole = recorder.served(NUM_PROMPTS, "whole", "--batch-size", "4").traces
    if not 5 <= count < NUM_PROMPTS or [t.id for t in resumed] != [t.id for t in whole]:
        yield f"resumed after {count} of {NUM_PROMPTS} prompts: other prompts"
    left = [*recorder.shared.iterdir()]
    if left:
        yield f"{len(left)} files are left in the shared folder"


def _check_sampled(recorder: Recorder) -> Iterator[str]:
    """Log-probabilities are those of the law that is asked for; the text is as likely as drawn."""
    decoding = Decoding(temperature=0.8, top_p=0.9, top_k=40, seed=5)
    options = ("--temperature", "0.8", "--top-p", "0.9", "--top-k", "40", "--seed", "5")
    more = ("--dtype", "float32")
    drawn = recorder.offline(NUM_PROMPTS, "drawn", *options, *more).traces
    ours = recorder.transformers(NUM_PROMPTS, "drawn-ours", *options, *more).traces
    target = AutoModelForCausalLM.from_pretrained(
        recorder.pair.folder / "target", dtype=torch.float32
    )
    worst, means = 0.0, []
    for traces in (drawn, ours):
        logprobs = []
        for trace in traces:
            with torch.no_grad():
                logits = target(input_ids=trace.token_ids[None, :-1]).logits[0]
            law = processed_logprobs(logits[trace.prompt_length - 1 :], decoding)
            emitted = trace.token_ids[trace.prompt_length :, None]
            assert trace.token_logprob is not None
            difference = (law.gather(1, emitted)[:, 0] - trace.token_logprob).abs()
            logprobs.append(trace.token_logprob)
            if traces is drawn:  # a token at the edge of top-p may be in or out
                worst = max(worst, float(difference.median()))
        means.append(torch.cat(logprobs))
    if worst > 1e-3:
        yield f"log-probabilities of drawn tokens differ by {worst}"
    deviation = float((means[0].var() / len(means[0]) + means[1].var() / len(means[1])) ** 0.5)
    away = float(means[0].mean() - means[1].mean()) / deviation
    if abs(away) > 4:
        yield f"drawn text is {away:.1f} deviations likelier than that of transformers"


def _speed(recorder: Recorder) -> list[str]:
    """Tokens per second beyond the start of each recorder, from two numbers of prompts."""
    lines = []
    for name, record in (("vLLM", recorder.offline), ("transformers", recorder.transformers)):
        options = ("--dtype", "bfloat16", "--max-new-tokens", str(MORE_TOKENS))
        few = record(FEW, f"speed-{name}-few", *options)
        many = record(MANY, f"speed-{name}-many", *options)
        tokens = many.traces.manifest.num_tokens - few.traces.manifest.num_tokens
        rate = tokens / (many.seconds - few.seconds)
        lines.append(
            f"| {name} | {few.seconds:.1f} | {many.seconds:.1f} | {rate:,.0f}"
            f" | {many.megabytes:,.0f} |"
        )
    return lines


def wait_until_healthy(server: "subprocess.Popen[bytes]", log: Path) -> None:
    end_of_patience = time.monotonic() + 300
    while True:
        with suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2).close()
            return
        if server.poll() is not None or time.monotonic() > end_of_patience:
            raise RuntimeError(
                f"the server does not start:\n{log.read_text(encoding='utf-8')[-4000:]}"
            )
        time.sleep(0.3)


def _resident_megabytes(group: int) -> float:
    """Of all processes of a group."""
    pages = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[2]) == group or int(fields[3]) == group:
                pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    sys.exit(main())
