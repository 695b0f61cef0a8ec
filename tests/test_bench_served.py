"""`scripts/dev/bench_served.sh`: what it would run is what the command line and the matrix take.

And it does run to its end, with all of draftquant on a shipped pair; the Hub and the engine are
stubs.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from draftquant.scripts import cli
from draftquant.validate.launch.matrix import Matrix, load_matrix
from test_server_process import free_port

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "dev" / "bench_served.sh"
PAIR = SCRIPT.parents[2] / "tests" / "pairs" / "eagle3-llama"
LAUNCHED = Path(__file__).parent / "launched_vllm.py"
DRAFTS = (
    "kimi-k2.5-eagle3",
    "kimi-k2.5-eagle3-mla",
    "kimi-k2.6-eagle3-mla",
    "kimi-k2.6-eagle3-nvidia",
    "kimi-linear-dflash",
)


def prompt_file(path: Path, tokens: Iterable[int]) -> Path:
    lines = (json.dumps({"id": f"p{i}", "category": "a", "token_ids": [i, 2]}) for i in tokens)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


FILES = tempfile.TemporaryDirectory()
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PROMPTS": str(prompt_file(Path(FILES.name, "my gate.jsonl"), range(160))),
    "CALIBRATION": str(prompt_file(Path(FILES.name, "c.jsonl"), range(160, 170))),
}


def bench(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def printed(*arguments: str, **environment: str) -> tuple[list[list[str]], list[str]]:
    """The commands of a dry run, and the matrices."""
    done = bench("--dry-run", *arguments, **{"OUT": "/my out", **environment})
    assert (done.returncode, done.stderr) == (0, "")
    text, matrices = done.stdout, []
    while "<<'MATRIX'\n" in text:
        before, _, rest = text.partition("cat >")
        _, _, rest = rest.partition("<<'MATRIX'\n")
        matrix, _, after = rest.partition("\nMATRIX\n")
        matrices.append(matrix)
        text = before + after
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [shlex.split(line) for line in lines], matrices


def of_ours(commands: list[list[str]]) -> list[list[str]]:
    """Arguments of those that are `draftquant`."""
    module = ["-m", "draftquant.scripts.cli"]
    found = []
    for words in commands:
        if words[0] == "draftquant":
            found.append(words[1:])
        elif words[1:3] == module:
            found.append(words[3:])
        else:
            assert words[0] in ("hf", "ln", "mv")
    return found


@pytest.fixture(scope="module")
def everything() -> tuple[list[list[str]], list[str]]:
    return printed()


def test_every_command_is_one_that_there_is(
    everything: tuple[list[list[str]], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    commands = of_ours(everything[0])
    for arguments in commands:
        try:
            cli.parser_of(arguments).parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{shlex.join(arguments)}\n{capsys.readouterr().err}")
    verbs = [arguments[0] for arguments in commands]
    assert verbs == 9 * [  # five drafts on vLLM, four on SGLang
        "inspect", "check", "record", "record", "quantize", "verify", "check", "gate", "parity",
        "measure", "measure", "parity", "gate", "reconcile",
    ]  # fmt: skip


def matrices_in(texts: list[str], folder: Path) -> list[Matrix]:
    found = []
    for number, text in enumerate(texts):
        path = folder / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        found.append(load_matrix(path))
    return found


def test_every_matrix_is_one(everything: tuple[list[list[str]], list[str]], tmp_path: Path) -> None:
    matrices = matrices_in(everything[1], tmp_path)
    assert [matrix.engine for matrix in matrices] == ["vllm", "vllm", "sglang", "sglang"] * 4 + [
        "vllm", "vllm"
    ]  # fmt: skip
    speed, outputs, of_sglang = matrices[:3]
    assert (speed.concurrencies, speed.repeats, speed.num_top_logprobs) == ((1, 2, 8, 40), 3, 0)
    assert (outputs.concurrencies, outputs.repeats, outputs.num_top_logprobs) == ((8, 16), 2, 2)
    assert speed.prompts == ENVIRONMENT["PROMPTS"]
    # Without it vLLM tells neither which draft it runs nor how it accepts.
    assert {m.engine: dict(m.environment) for m in matrices} == {
        "vllm": {"VLLM_SERVER_DEV_MODE": "1"}, "sglang": {},
    }  # fmt: skip
    none, bf16, quantized = speed.variants
    assert "--speculative-config" not in speed.command_of(none)
    assert speed.command_of(bf16)[-1] == (
        '{"method": "eagle3", "model": "/my out/kimi-k2.5-eagle3.vllm/bf16",'
        ' "num_speculative_tokens": 3}'
    )
    assert speed.command_of(quantized)[-1].count("int4-channel-gptq") == 1
    dflash = matrices[-1]
    assert dflash.command_of(dflash.variants[1])[-1].startswith('{"method": "dflash"')
    assert dflash.command_of(dflash.variants[1])[-1].endswith('"num_speculative_tokens": 15}')
    words = of_sglang.command_of(of_sglang.variants[1])
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "4"  # K + 1
    assert words[-2:] == ("--speculative-draft-model-quantization", "unquant")
    assert "unquant" not in of_sglang.command_of(of_sglang.variants[2])


def test_drafts_engines_and_recipes_are_chosen(tmp_path: Path) -> None:
    commands, matrices = printed(
        "--engine", "sglang", "kimi-k2.5-eagle3-mla", TP="4", ARCH="gfx942", REPEATS="5",
        SGLANG_ARGUMENTS="--nnodes 2",
    )  # fmt: skip
    (matrix, _) = matrices_in(matrices, tmp_path)
    assert matrix.repeats == 5
    command = " ".join(matrix.command_of(matrix.variants[0]))
    assert "--tp-size 4" in command
    assert command.endswith("--nnodes 2")
    quantize = next(words for words in of_ours(commands) if words[0] == "quantize")
    assert quantize[quantize.index("--recipe") + 1] == "fp8-ptpc"
    check = next(words for words in of_ours(commands) if words[0] == "check")
    assert check[check.index("--arch") + 1] == "gfx942"
    commands, _ = printed("--engine", "vllm", "kimi-linear-dflash", RECIPE="int4-group128")
    quantize = next(words for words in of_ours(commands) if words[0] == "quantize")
    assert quantize[quantize.index("--recipe") + 1] == "int4-group128"
    assert quantize[quantize.index("-k") + 1] == "15"


def test_a_draft_that_an_engine_cannot_serve_is_said() -> None:
    done = bench("--dry-run", "kimi-linear-dflash", "--engine", "sglang")
    assert "kimi-linear-dflash on sglang: SKIPPED" in done.stdout
    assert "draftquant" not in done.stdout


def test_names_and_wrong_arguments() -> None:
    assert tuple(bench("--list").stdout.split()) == DRAFTS
    assert "--dry-run" in bench("--help").stdout
    for arguments, what in (
        (("kimi",), "error: kimi: no such draft; use one of: kimi-k2.5-eagle3, "),
        (("--engine", "trt"), "error: --engine: expected vllm or sglang"),
        (("--engine",), "error: --engine: expected vllm or sglang"),
        (("--dry",), "error: --dry: no such option"),
    ):
        done = bench(*arguments)
        assert done.returncode == 2
        assert what in done.stderr


def test_prompts_are_looked_at_before_anything_is_fetched(tmp_path: Path) -> None:
    few = prompt_file(tmp_path / "few", range(159))
    text = tmp_path / "text"
    text.write_text('{"id": "a", "category": "b", "text": "c"}\n', encoding="utf-8")
    for changes, what in (
        ({"PROMPTS": ""}, "error: set PROMPTS to a file of prompts with token_ids"),
        ({"CALIBRATION": ""}, "error: set CALIBRATION to a file"),
        ({"PROMPTS": "none.jsonl"}, f"error: PROMPTS: no file {Path.cwd()}/none.jsonl"),
        ({"CALIBRATION": str(tmp_path)}, "error: CALIBRATION: no file"),
        ({"PROMPTS": str(few)}, f"expected at least 160 prompts, {few} has 159"),
        ({"CALIBRATION": str(text)}, "expected token_ids in each of the 1 lines"),
        ({"CALIBRATION": str(few)}, "expected other prompts, 159 are in both"),
    ):
        done = bench("--dry-run", **changes)
        assert (done.returncode, done.stdout) == (2, "")
        assert what in done.stderr
    assert bench("--dry-run", PROMPTS=str(few), CONCURRENCIES="1, 8").returncode == 0


FAKE = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
out=""
for ((i = 1; i <= $#; i++)); do
  j=$((i + 1))
  case "${!i}" in --out | --local-dir | --plot) mkdir -p "${!j}" ;; esac
done
case "$1 $*" in
  *"$SAYS_NO"*) exit "$STATUS" ;;
esac
exit 0
"""


def run_with_fakes(tmp_path: Path, says_no: str, status: int) -> tuple[int, str, list[str]]:
    """The script itself, all commands it runs being fakes that note what they are asked."""
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir(exist_ok=True)
    calls.write_text("", encoding="utf-8")
    for name in ("draftquant", "hf", "python3"):
        (tools / name).write_text(FAKE, encoding="utf-8")
        (tools / name).chmod(0o755)
    done = bench(
        "--engine", "vllm", "kimi-k2.5-eagle3", "kimi-linear-dflash",
        PATH=f"{tools}:{os.environ['PATH']}", OUT=str(tmp_path / "out"), CALLS=str(calls),
        SAYS_NO=says_no, STATUS=str(status),
    )  # fmt: skip
    return done.returncode, done.stdout, calls.read_text(encoding="utf-8").splitlines()


def test_verdicts_stop_nothing_and_are_not_asked_for_again(tmp_path: Path) -> None:
    status, said, calls = run_with_fakes(tmp_path, "gate --measured", 3)
    assert status == 3
    assert "# kimi-k2.5-eagle3 on vllm: BF16 check: PASS; verify: PASS;" in said
    assert "gate on servers: INCONCLUSIVE; reconcile: PASS" in said
    assert len(calls) == 2 * 16
    assert [*(tmp_path / "out").rglob("*.part")] == []
    status, _, calls = run_with_fakes(tmp_path, "nothing", 0)
    assert status == 3  # as it was judged
    # What was fetched, made or judged is not again.
    assert {call.split()[1] for call in calls} == {"inspect", "measure"}


def test_a_no_is_worse_than_not_knowing_and_an_error_ends_its_draft(tmp_path: Path) -> None:
    status, said, _ = run_with_fakes(tmp_path, "gate /", 1)
    assert status == 1
    assert "gate on traces: says NO; parity of proposals: PASS" in said
    (tmp_path / "again").mkdir()
    status, said, calls = run_with_fakes(tmp_path / "again", "verify", 2)
    assert status == 2
    assert said.count("STOPPED by an error (2)") == 2  # the next draft has its turn
    assert not any("gate" in call for call in calls if call.startswith("draftquant gate"))


def test_a_matrix_of_other_settings_is_not_overwritten(tmp_path: Path) -> None:
    run_with_fakes(tmp_path, "nothing", 0)
    matrix = tmp_path / "out" / "kimi-k2.5-eagle3.vllm" / "speed.yaml"
    matrix.write_text(
        matrix.read_text(encoding="utf-8").replace("repeats: 3", "repeats: 4"), encoding="utf-8"
    )
    status, said, _ = run_with_fakes(tmp_path, "nothing", 0)
    assert status == 2
    assert "repeats: 4" in matrix.read_text(encoding="utf-8")
    assert "STOPPED" in said


HUB = """#!/usr/bin/env bash
# download REPOSITORY --local-dir FOLDER; the target breaks off in the middle once.
echo "$*" >>"$CALLS"
mkdir -p "$4"
case "$2" in
  moonshotai/*)
    cp "$PAIR/target/config.json" "$4"
    [[ -e "$4/begun" ]] || { touch "$4/begun" && exec sleep 600; }
    cp "$PAIR"/target/* "$4"
    ;;
  *) cp "$PAIR"/draft/* "$4" ;;
esac
"""
ENGINE = """#!/usr/bin/env bash
# The engine's python: it serves as vLLM does, and transformers records for it.
[[ "$2" == draftquant.scripts.cli ]] || exec "$REAL_PYTHON" "$LAUNCHED" "${@:4}"
words=()
while (($#)); do
  case "$1" in --engine | --engine-arg) shift ;; *) words+=("$1") ;; esac
  shift
done
exec "$REAL_PYTHON" "${words[@]}"
"""


def killed_once(command: list[str], environment: dict[str, str], when: Callable[[], bool]) -> None:
    """The script and all in its group, with SIGKILL."""
    process = subprocess.Popen(
        command, env=environment, cwd=environment["HOME"], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not when():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_it_runs_to_its_end_and_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """By paths that are not absolute; killed while it fetches, and again while it measures."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("hf", HUB), ("engine", ENGINE)):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    for name, source, count in (("gate", "prompts", 12), ("other", "calibration", 8)):
        lines = (PAIR / f"{source}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / name).write_text("".join(lines[:count]), encoding="utf-8")
    command = ["bash", str(SCRIPT), "--engine", "vllm", "kimi-k2.5-eagle3"]
    environment = {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path), "CALLS": str(tmp_path / "calls"), "PAIR": str(PAIR),
        "REAL_PYTHON": sys.executable, "LAUNCHED": str(LAUNCHED), "OMP_NUM_THREADS": "1",
        "OUT": "out", "TARGETS": "targets", "DRAFTS": "drafts", "PROMPTS": "gate",
        "CALIBRATION": "other", "VLLM": str(tools / "engine"), "CONCURRENCIES": "1, 2",
        "REPEATS": "1", "MAX_NEW_TOKENS": "48", "TP": "1", "PORT": str(free_port()),
    }  # fmt: skip
    partial = tmp_path / "targets" / "Kimi-K2.5.part" / "begun"
    killed_once(command, environment, partial.exists)
    assert not (tmp_path / "targets" / "Kimi-K2.5").exists()
    measured = tmp_path / "out" / "kimi-k2.5-eagle3.vllm" / "speed" / "measurements"
    first, begun = measured / "none.c1.r1.jsonl", measured / "none.c1.r1.jsonl.measuring"
    # What is begun is removed after what is done has its name: a kill between leaves both.
    killed_once(command, environment, lambda: first.exists() and not begun.exists())
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    said = done.stdout
    assert "STOPPED" not in said
    assert done.returncode in (1, 3)  # verdicts on twelve prompts and a stub that ignores its draft
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    fetched = [call.split()[1] for call in calls]
    target = "moonshotai/Kimi-K2.5"
    assert fetched == ["lightseekorg/kimi-k2.5-eagle3", target, target]
    assert [path.name for path in sorted(measured.iterdir())] == [
        f"{variant}.c{concurrency}.r1.jsonl"
        for variant in ("bf16", "none", "quantized")
        for concurrency in (1, 2)
    ]
    for judged in ("BF16 check", "verify", "check", "gate on traces", "parity of proposals",
                   "parity of outputs", "gate on servers", "reconcile"):  # fmt: skip
        assert f"{judged}: " in said.splitlines()[-1]
    assert "gate on servers: INCONCLUSIVE" in said.splitlines()[-1]
    report = (measured.parents[1] / "gate-measured.json").read_text(encoding="utf-8")
    assert "step accepted as many tokens as with bf16.c8.r1.jsonl" in report
