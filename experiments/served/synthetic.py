"""Serve a shipped pair that accepts as its golden acceptance says, and hold the server against it.

The server's
draft is config.json alone, with dummy weights. Its kernels are those of `synthetic_cpu`; `--stock`
leaves these out, and prints where vLLM stops on a CPU.

Exit status 1: the server's acceptance length is further from golden than four standard errors.
"""

import argparse
import json
import math
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

from draftquant.validate.golden.golden_acceptance import read_golden  # noqa: E402
from served.drafts import SERVED_PAIRS, record  # noqa: E402
from served.recording import PORT, end, started, wait_until_healthy  # noqa: E402

CLI = (sys.executable, "-m", "draftquant.scripts.cli")
PAIR = SERVED_PAIRS[0]
STOPS = "Synthetic acceptance not supported with CPU sampling"


def plugin(work: Path) -> None:
    """`synthetic_cpu` as a package that vLLM finds."""
    shutil.copy(HERE / "synthetic_cpu.py", work)
    told = work / "synthetic_cpu-0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: synthetic-cpu\nVersion: 0\n", encoding="utf-8"
    )
    (told / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nsynthetic_cpu = synthetic_cpu:register\n", encoding="utf-8"
    )


def ran(*command: str) -> str:
    """Output of `draftquant`."""
    return subprocess.run([*CLI, *command], check=True, text=True, stdout=subprocess.PIPE).stdout


def speculative(golden: Path, work: Path) -> str:
    """What the server gets: golden's keys, and a draft without weights."""
    _, keys = shlex.split(ran("golden", str(golden), "--for", "vllm"))
    draft = work / "draft"
    draft.mkdir()
    shutil.copy(PAIR.folder / "draft" / "config.json", draft)
    own = {
        "method": PAIR.method,
        "model": str(draft),
        "draft_load_config": {"load_format": "dummy"},
    }
    return json.dumps({**own, **json.loads(keys)})


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True, help="of the engine's environment")
    parser.add_argument("--stock", action="store_true", help="without the plugin")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        golden, measured = work / "golden.json", work / "measured.json"
        prompts = PAIR.write_prompts(work / "prompts.jsonl")
        record(PAIR, prompts, work / "traces", max_new_tokens=128)
        ran("replay", str(PAIR.folder / "draft"), "--traces", str(work / "traces"),
            "-k", str(PAIR.num_draft_tokens), "--golden", str(golden))  # fmt: skip
        plugin(work)
        command = [
            *("env", f"PYTHONPATH={work}", "VLLM_SERVER_DEV_MODE=1"),
            f"VLLM_PLUGINS={'' if options.stock else 'synthetic_cpu'}",
            *(str(options.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(PAIR.folder / "target"), "--port", str(PORT), "--enforce-eager"),
            *("--speculative-config", speculative(golden, work), "--max-model-len", "512"),
            *("--max-num-seqs", "16", "--per-request-spec-decode-metrics", "detailed"),
        ]
        log = work / "server.log"
        with log.open("wb") as stream:
            server = started(command, stream)
        try:
            wait_until_healthy(server, log)
            ran("measure", "--server", f"http://127.0.0.1:{PORT}", "--engine", "vllm",
                "--prompts", str(prompts), "--out", str(work / "m.jsonl"), "--ignore-eos",
                "--max-new-tokens", "256", "--golden", str(measured))  # fmt: skip
        except subprocess.CalledProcessError:
            text = log.read_text(encoding="utf-8")
            sys.stdout.write(f"vLLM stops: {STOPS}\n" if STOPS in text else text[-3000:])
            return 0 if options.stock and STOPS in text else 1
        finally:
            end(server)
        own, found = read_golden(golden).all, read_golden(measured).all
    error = math.sqrt(found.variance_of_step / found.verify_steps)
    far = (found.mean_acceptance_length - own.mean_acceptance_length) / error
    sys.stdout.write(
        f"golden {own.mean_acceptance_length:.4f}, {shown(own.acceptance_rates)}\n"
        f"served {found.mean_acceptance_length:.4f} +- {error:.4f}, {shown(found.acceptance_rates)}"
        f" over {found.verify_steps:,} verify steps: {far:+.2f} standard errors\n"
    )
    return abs(far) > 4


def shown(rates: tuple[float, ...]) -> str:
    """Shares."""
    return " ".join(f"{rate:.3f}" for rate in rates)


if __name__ == "__main__":
    sys.exit(main())
