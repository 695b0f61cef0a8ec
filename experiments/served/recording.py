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
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

from draftquant.calibration.traces.trace_folder import TraceFolder  # noqa: E402
from served.drafts import ENGINE_ARGUMENTS, SERVED_PAIRS, Pair  # noqa: E402
from served.recorded import Compared, compare, compared_row, document  # noqa: E402
from served.serve import ENVIRONMENT  # noqa: E402

RESULTS = HERE / "RECORDED.md"
NUM_PROMPTS, MAX_NEW_TOKENS = 48, 64
FEW = 16  # prompts, for what is no question of statistics
PORT = 8817
ENGINE = ("--engine", "vllm")
MAX_RELATIVE = {"bfloat16": 0.02, "float32": 1e-4}
"""Of a layer's outputs; BF16 keeps 8 bits, and sums are taken in another order."""


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
        for count in (FEW, NUM_PROMPTS):
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

    def offline(self, count: int, out: str, *options: str) -> TraceFolder:
        """By an engine of our own."""
        asked = (*ENGINE, *ENGINE_ARGUMENTS, *self.pair.recording)
        return self._run(self.command(self.engine, count, out, *asked, *options))

    def transformers(self, count: int, out: str, *options: str) -> TraceFolder:
        """By transformers, in this interpreter's environment."""
        return self._run(self.command(sys.executable, count, out, *options))

    def served(self, count: int, out: str, *options: str) -> TraceFolder:
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

    def _run(self, command: Sequence[str]) -> TraceFolder:
        with (self.work / "record.log").open("wb") as log:
            process = started(command, log)
        if process.wait():
            said = (self.work / "record.log").read_text(encoding="utf-8")[-4000:]
            raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}:\n{said}")
        return TraceFolder.open(Path(command[command.index("--out") + 1]))


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
        failed += _check_server(recorder)
    once = RESULTS.read_text(encoding="utf-8").partition("\n## Asked once")[1:]
    text = document(lines, gate=NUM_PROMPTS, new=MAX_NEW_TOKENS) + "".join(once)
    RESULTS.write_text(text, encoding="utf-8")
    for problem in failed:
        print(problem)
    return 1 if failed else 0


def _both(recorder: Recorder, dtype: str) -> Compared:
    dtyped = ("--dtype", dtype)
    engine = recorder.offline(NUM_PROMPTS, f"vllm-{dtype}", *dtyped)
    reference = recorder.transformers(NUM_PROMPTS, f"transformers-{dtype}", *dtyped)
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


def _check_server(recorder: Recorder) -> Iterator[str]:
    """The server writes what the offline engine does, also where it dies and is started again."""
    offline = recorder.offline(FEW, "offline")
    with recorder.serving() as server:
        if recorder.served(FEW, "served").sha256 != offline.sha256:
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
        resumed = recorder.served(NUM_PROMPTS, "resumed", "--batch-size", "4")
        whole = recorder.served(NUM_PROMPTS, "whole", "--batch-size", "4")
    if not 5 <= count < NUM_PROMPTS or [t.id for t in resumed] != [t.id for t in whole]:
        yield f"resumed after {count} of {NUM_PROMPTS} prompts: other prompts"
    left = [*recorder.shared.iterdir()]
    if left:
        yield f"{len(left)} files are left in the shared folder"


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


if __name__ == "__main__":
    sys.exit(main())
