"""What is no file, too large, or text that no terminal should get raw: an error, and soon."""

import ast
import gc
import json
import os
import re
import resource
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from draftquant.calibration.dumps.dump_layouts import load_safetensors, load_tensors
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.shared.block_layers import read_mask_embedding
from draftquant.quantize.pairing.target import Tokenizer
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import DraftQuantError, PromptError, short, visible
from draftquant.recipes.regular_file import open_regular, read_text
from draftquant.recipes.strict_json import JsonProblem, parse_json
from draftquant.scripts.cli import main
from draftquant.validate.foreign.foreign_formats import read_foreign
from draftquant.validate.foreign.foreign_measurement import object_in
from draftquant.validate.golden.profile import read_profile
from draftquant.validate.measure.measurement_file import read_measurement
from draftquant.validate.report.document import read_report
from test_packaging import MODULES, ROOT, parsed
from tiny import Stored, edit_json, tiny_eagle3_llama, write_safetensors

NEVER = 300  # seconds of what ends at once, if it ends at all
EVIL = "\x1b[31m\x07\r\x9b2J\u202eevil\u2028[red]\n"
"""Escape, bell, return, C1, text direction, line ends and markup."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("hostile") / "source", sharded=True)


# ---- files that are none


@pytest.mark.untold
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    gc.collect()  # what other tests left open is closed now, and not between two looks below
    (tmp_path / "file").write_text("text", encoding="utf-8")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    os.close(open_regular(tmp_path / "link"))
    assert read_text(tmp_path / "file") == "text"
    for path, what in (
        (tmp_path, "a folder, not a file"),
        (tmp_path / "fifo", "a FIFO, not a file"),
        (Path("/dev/zero"), "a device or a socket, not a file"),
        (tmp_path / "none", "No such file"),
        (Path("a\0b"), "no file can have this name"),
    ):
        before = os.dup(0)
        with pytest.raises(OSError, match=what):
            open_regular(path)
        assert os.dup(0) == before + 1  # the lowest that is free: nothing was left open
        os.closerange(before, before + 2)
    assert len(read_text(tmp_path / "file", 4)) == 4
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_text(tmp_path / "file", 3)


HOMES = {
    # Of /proc, of the identity of this machine, of an installed distribution, and our own tables.
    "read_text": {"quantize/files/staging.py", "recipes/installing.py", "recipes/packages.py"},
    "read_bytes": set(),
    "open": {"recipes/regular_file.py", "quantize/files/safetensors_file.py",
             "scripts/frame/streams.py", "quantize/files/staging.py",  # a folder, to lock it
             "quantize/backends/quark_backend.py", "quantize/files/publish.py",  # to sync
             # New files in a staging folder and in one of their own.
             "quantize/verify/cut_view.py", "quantize/asking/child_process.py"},
    "loads": {"recipes/strict_json.py", "recipes/packages.py"},
    "load": {"quantize/files/torch_file.py", "calibration/linear_inputs/plan_inputs.py"},
    "print": set(),
}  # fmt: skip
"""Methods that open, read, parse or print, and the modules that call them: the others ask these."""
OURS = {"Checkpoint", "TraceFolder", "ShardFolder", "traces", "run.traces", "part"}


def callers() -> dict[str, set[str]]:
    """Which modules call each of these methods, but for some of ours of the same name."""
    found: dict[str, set[str]] = {method: set() for method in HOMES}
    named = re.compile(rf"\.({'|'.join(HOMES)})\(")
    for module in (one for one in MODULES if named.search((ROOT / one).read_text("utf-8"))):
        if "quantize/asking/inside" in module.as_posix():  # it runs where none of ours is
            continue
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr not in HOMES:
                    continue
                owner = ast.unparse(node.func.value)
                if owner not in OURS and "self" not in owner:
                    found[node.func.attr].add(module.as_posix())
    return found


def test_files_are_opened_and_text_is_printed_in_one_home() -> None:
    for method, found in callers().items():
        assert {name for name in found if not name.startswith("scripts/dev/")} == HOMES[method]


DRAFT_FILES = ("config.json", "model.safetensors.index.json", "hf_quant_config.json",
               "model-00001-of-00002.safetensors", "draftquant.json")  # fmt: skip


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def gigabyte(path: Path) -> None:
    """With holes: it takes no room on the disk."""
    with path.open("wb") as stream:
        stream.write(b"{" if path.suffix == ".json" else (2**30 - 8).to_bytes(8, "little"))
        stream.truncate(2**30)


@contextmanager
def bounded(seconds: int = 10, megabytes: int = 500) -> Iterator[None]:
    """The block takes little time of this process, and never more memory than it had by more.

    Its own time: a busy machine changes nothing. What waits for ever takes none, and is ended.
    """

    def late(number: int, _frame: FrameType | None) -> None:
        why = "it waits" if number == signal.SIGALRM else f"{seconds} seconds of the CPU"
        raise AssertionError(f"still running: {why}")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    handlers = {number: signal.signal(number, late) for number in timers}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, NEVER)
    try:
        yield
    finally:
        for number, timer in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, handlers[number])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes * 1000


MAKES: Sequence[Callable[[Path], None]] = (gigabyte, endless, os.mkfifo)


@pytest.mark.parametrize(("number", "file"), [*enumerate(DRAFT_FILES)])
def test_no_file_of_a_draft_blocks_or_fills_the_memory(
    number: int, file: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = tiny_eagle3_llama(tmp_path / "draft", sharded=True)
    (draft / file).unlink(missing_ok=True)
    MAKES[number % 3](draft / file)
    with bounded(megabytes=100):
        assert main(["verify", str(draft), "--against", str(source)]) in (1, 2)
    assert file in "".join(capsys.readouterr())
    if file != "draftquant.json":  # which inspect does not read
        with bounded(megabytes=100):
            assert main(["inspect", str(draft)]) == 2
        assert file in capsys.readouterr().err


OTHER_FILES: dict[str, Callable[[Path], object]] = {
    "recipe.yaml": load_recipe,
    "trace.json": lambda path: TraceFolder.open(path.parent),
    "prompts.jsonl": read_prompts,
    "prompts.parquet": read_prompts,
    "data_0.ckpt": load_tensors,
    "data_0.ckpt.gz": load_tensors,
    "hs_0.safetensors": lambda path: load_safetensors(path, ("token_ids",), beside=()),
    "measurement.jsonl": read_measurement,
    "foreign.jsonl": read_foreign,
    "profile.json": object_in,
    "tokenizer.json": lambda path: Tokenizer.read(path.parent),
    "report.json": read_report,
    "golden.json": read_profile,
    "mask_embedding.pt": lambda path: read_mask_embedding(path, 64, 1),
}


@pytest.mark.parametrize(("number", "file"), [*enumerate(OTHER_FILES)])
def test_no_other_file_does(number: int, file: str, tmp_path: Path) -> None:
    MAKES[number % 3](tmp_path / file)
    # A line of a measurement may have 64 MiB, which are read twice over before it is refused.
    with bounded(megabytes=200), pytest.raises(DraftQuantError) as caught:
        OTHER_FILES[file](tmp_path / file)
    assert str(tmp_path / file) in caught.value.where


# ---- large and deep documents


def test_json_that_cannot_be_handled_later() -> None:
    for text, what in (
        ("[" * 101 + "]" * 101, "more than 100 levels"),
        ("[" * 50_000, "not JSON"),
        ("9" * 5000, "not JSON"),
        ("9" * 41, "more than 40 digits"),
        (r'"\ud800"', r"'\\ud800' is half a character"),
        (r'{"\uDFFF": 1}', r"'\\udfff' is half a character"),
        ("[" + "0," * 2_000_000 + "0]", "more than 2,000,000 values"),
    ):
        with bounded(), pytest.raises(JsonProblem, match=what):
            parse_json(text)
    assert parse_json(r'"\ud83d\ude00"') == "\U0001f600"
    assert [parse_json("[" * 100 + "]" * 100), parse_json("9" * 40)][1] == 10**40 - 1


def test_recipes_that_are_none(tmp_path: Path) -> None:
    deep, long = "a: " + "[" * 30_000, "group_size: " + "9" * 60_000
    texts = (
        "name: &a [1]\nrules: *a",
        deep,
        long,
        "? [1]\n: 2",
        "a: .nan\nb: 1e400",
        "a: 1\n" * 3000,
    )
    for text in texts:
        (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
        with bounded(), pytest.raises(DraftQuantError, match=r"mine\.yaml") as caught:
            load_recipe(tmp_path / "mine.yaml")
        assert len(str(caught.value)) < 30_000


def test_prompts_of_any_number_of_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    long = " " * (16 * 2**20 + 1)
    for text, said in (("{\n" * 50_000, "50000 line"), (long, "line 1 has more than 16,777,216 b")):
        path.write_text(text, encoding="utf-8")
        with bounded(), pytest.raises(PromptError, match=said):
            read_prompts(path)


# ---- text


def test_what_is_not_printable_is_escaped() -> None:
    assert visible("d[red] é ≈ 日本") == "d[red] é ≈ 日本"
    assert visible(EVIL) == r"\x1b[31m\x07\r\x9b2J\u202eevil\u2028[red]\n"
    assert visible("\udcff\x7f\xad\u200b") == r"\udcff\x7f\xad\u200b"
    assert short("a" * 10**6) == short("a" * 10**6)[:200]
    error = DraftQuantError(f"folder{EVIL}", EVIL * 10_000, fix=EVIL, details=[EVIL])
    assert [line.isprintable() for line in str(error).split("\n")] == [True] * 3
    assert len(str(error)) < 20_000


COMMANDS = (
    "inspect DRAFT",
    "plan DRAFT --recipe int4-channel",
    "quantize DRAFT --recipe int4-channel --out OUT",
    "verify DRAFT --against SOURCE",
    "check DRAFT --engine vllm",
    "recipes check DRAFT/mine.yaml",
    "record --target DRAFT --prompts DRAFT/p.jsonl --out OUT",
    "replay DRAFT --traces DRAFT",
    "gate DRAFT DRAFT --traces DRAFT",
)


def with_files(folder: Path) -> None:
    """Every file that has no tensors is EVIL."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": [EVIL]}
    edit_json(folder / "config.json", quantization_config=config)
    for file, value in (("draftquant.json", {EVIL: 1}), ("mine.yaml", {EVIL: EVIL}),
                        ("p.jsonl", {"id": EVIL}), ("trace.json", {EVIL: 1})):  # fmt: skip
        (folder / file).write_text(json.dumps(value), encoding="utf-8")


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda folder: edit_json(folder / "config.json", architectures=[EVIL]),
    "tensor": lambda folder: write_safetensors(
        folder / "model-00001-of-00002.safetensors",
        {EVIL: Stored("F32", (1,), bytes(4))},
        {"\ud800": EVIL},
    ),
    "files": with_files,
}


@pytest.mark.some(2)
@pytest.mark.parametrize("change", CHANGES)
def test_no_command_prints_what_a_terminal_would_obey(
    change: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(f"d{EVIL}".encode() + b"\xff")  # bytes, whatever text they are
    folder = tiny_eagle3_llama(tmp_path / name, sharded=True)
    named = {"DRAFT": str(folder), "SOURCE": str(source), "OUT": str(tmp_path / "out")}
    made = main(["quantize", str(folder), "--recipe", "int4-channel", "--out", named["OUT"]])
    assert made == main(["verify", named["OUT"], "--against", str(folder)]) == 0
    CHANGES[change](folder)
    for arguments in map(str.split, COMMANDS):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        filled = [re.sub("DRAFT|SOURCE|OUT", lambda found: named[found[0]], a) for a in arguments]
        assert main(filled) in (0, 1, 2, 3), arguments
        printed = capsys.readouterr()
        text = printed.out + printed.err
        assert all(line.isprintable() for line in text.split("\n")), arguments
        assert printed.out or printed.err


# ---- what is printed to be copied


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_launch_command_can_be_copied(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the folder is called, a shell runs nothing else."""
    folder = tiny_eagle3_llama(tmp_path / """it's "a" $(touch x); `y` [red]""")
    assert main(["check", str(folder), "--engine", engine]) in (0, 3)
    lines = capsys.readouterr().out.split("\n")
    (line,) = (x for x in lines if x.startswith(("serve", "to try", "try it")))
    (word,) = (word for word in shlex.split(line.partition(": ")[2]) if "touch" in word)
    assert (str(folder) if engine == "sglang" else json.dumps(str(folder))) in word
