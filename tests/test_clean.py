"""Staging folders of dead processes are removed by the next run and by `clean`, nothing else is."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from draftquant.quantize.files.staging import find_staging, staged_output, staging_name
from draftquant.recipes.errors import OutputError
from draftquant.scripts.cli import main


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def left_by(parent: Path, out: str, pid: int, *, start: int = 1, place: str | None = None) -> Path:
    """The staging folder of a run, with a file in it."""
    here = staging_name("x").rpartition("-")[2].removesuffix(".staging")
    folder = parent / f".{out}.{pid}-{start}-{place or here}.staging"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


OTHER = "0123456789ab"
INNOCENT = (".out.staging", ".out.1-2.staging", "out.1-2-0123456789ab.staging", ".out.abc.staging",
            ".1-2-0123456789ab.staging", ".out.12345678-2-0123456789ab.staging")  # fmt: skip


def test_a_live_run_says_so_and_the_next_one_removes_what_its_output_left(
    dead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with staged_output(tmp_path / "a.b") as staging:
        (found,) = find_staging(tmp_path)
        assert (found.path, found.out, found.is_here, found.is_live) == (staging, "a.b", True, True)
        assert main(["clean", str(tmp_path)]) == 0
        assert staging.is_dir()
        for of, name, other in (
            (Path, "readlink", "pid:[1]"), (Path, "read_text", "ab"), (socket, "gethostname", "ab"),
        ):  # fmt: skip
            with monkeypatch.context() as container:
                container.setattr(Path, "is_file", lambda _: True)  # a machine that has a name
                container.setattr(of, name, lambda *_, other=other, **__: other)
                assert not find_staging(tmp_path)[0].is_here
    gone = left_by(tmp_path, "out", dead)
    other = left_by(tmp_path, "other", dead)
    elsewhere = left_by(tmp_path, "out", dead, place=OTHER)
    live = left_by(tmp_path, "out", os.getppid(), start=int(start_of(os.getppid())))
    with staged_output(tmp_path / "out"):
        assert not gone.exists()
    assert names(tmp_path) == {"a.b", "out", other.name, elsewhere.name, live.name}


def start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]


def test_a_number_given_twice_is_another_process_and_an_unawaited_is_dead(tmp_path: Path) -> None:
    stranger = left_by(tmp_path, "out", os.getpid(), start=int(start_of(os.getpid())) - 1)
    (found,) = find_staging(tmp_path)
    assert (found.path, found.is_live) == (stranger, False)
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    left_by(tmp_path / "of", "out", process.pid, start=int(start_of(process.pid)))
    assert find_staging(tmp_path / "of")[0].is_live
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not find_staging(tmp_path / "of")[0].is_live
    process.communicate()


def test_clean_prints_what_it_removes(dead: int, tmp_path: Path) -> None:
    gone = [left_by(tmp_path, name, dead) for name in ("a", "b")]
    left_by(tmp_path, "out", dead, place=OTHER)
    (tmp_path / "out").mkdir()
    for name in INNOCENT:
        (tmp_path / name).mkdir()
    (tmp_path / f".f.{dead}-1-{OTHER}.staging").write_text("a file", encoding="utf-8")
    (tmp_path / f".l.{dead}-1-{OTHER}.staging").symlink_to(tmp_path / "out")
    before = names(tmp_path)
    assert main(["clean", str(tmp_path)]) == 0
    assert before - names(tmp_path) == {folder.name for folder in gone}


def test_other_machines_need_an_age(dead: int, tmp_path: Path) -> None:
    old, new = (left_by(tmp_path, name, dead, place=OTHER) for name in ("old", "new"))
    for path in (old / "model.safetensors", old):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert main(["clean", str(tmp_path), "--older-than", "3"]) == 0
    assert names(tmp_path) == {old.name, new.name}
    assert main(["clean", str(tmp_path), "--older-than", "1"]) == 0
    assert names(tmp_path) == {new.name}
    os.utime(new, (0, 0))  # a file in it is younger
    assert main(["clean", str(tmp_path), "--older-than", "1"]) == 0
    assert names(tmp_path) == {new.name}


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no such folder"):
        main(["clean", str(tmp_path / "absent"), "--debug"])


# ---- signals

SLEEPER = """
import os, signal, sys, time
from draftquant.quantize.files.staging import staged_output
from draftquant.scripts import cli
from draftquant.scripts.verbs import clean
from pathlib import Path
def run(options):
    with staged_output(Path(options.settings.folder) / "out"):
        os.kill(os.getpid(), int(number))
        time.sleep(0 if ignored else 60)
    return 0
clean.run = run
for number, ignored in (each.split() for each in sys.argv[2:]):
    folder = Path(sys.argv[1]) / number / ignored
    folder.mkdir(parents=True)
    ignored = ignored == "ignored"
    if not (child := os.fork()):  # whatever the parent of a run ignores, as nohup does
        usual = signal.default_int_handler if int(number) == signal.SIGINT else signal.SIG_DFL
        signal.signal(int(number), signal.SIG_IGN if ignored else usual)
        os._exit(cli.main(["clean", str(folder)]))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, len(list(folder.iterdir())), flush=True)  # or the next child has it too
"""


def test_a_signal_leaves_nothing_and_one_that_the_parent_ignores_stays_so(tmp_path: Path) -> None:
    """A run that is ended by one has its exit code; one below nohup writes its output."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    cases = [f"{int(number)} {how}" for number in numbers for how in ("ends", "ignored")]
    command = [sys.executable, "-c", SLEEPER, str(tmp_path), *cases]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.splitlines() == ["143 0", "0 1", "129 0", "0 1", "130 0", "0 1"]


def test_a_signal_turned_into_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does where a handler raises while safetensors reads."""

    def reads(_options: object) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise ValueError("could not determine the shape of object type") from None
        return 0

    monkeypatch.setattr("draftquant.scripts.verbs.clean.run", reads, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["clean", str(tmp_path)])
    assert ended.value.code == 143
