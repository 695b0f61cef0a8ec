"""The folder in which scenes are played, two at a time, each command in a process of its own.

A command is a fork of this process, which has imported torch and transformers already: it costs
what it computes. Commands are called by the entry point `draftquant` of the installed package, so
no path of a module is named here.
"""

import importlib
import importlib.metadata
import os
import re
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from drafts import write_generated_draft
from made import MADE
from outcomes import Outcome, Texts, read_outcomes, repeatable, write_outcomes
from scenes import Scene
from served import served

LANES = 2
_WRITES = re.compile(r" --(?:out|report|html|markdown|junit|golden|plot)\b")
_SAYS = re.compile(r"^(?:completion|help|.*--(?:help|version|print-server-args))\b")
_ENVIRONMENT = {
    "COLUMNS": "160",
    "HF_HUB_OFFLINE": "1",
    "LC_ALL": "C.UTF-8",
    "NO_COLOR": "1",
    "TZ": "UTC",
}
_IMPORTED = ("torch", "transformers", "transformers.models.auto", "scipy.stats", "safetensors")


class Stage:
    """The shipped pairs by name, and a folder for each scene.

    Args:
        root: an empty folder, in which all commands run.
        given: folders to copy into it, by name.
        texts: where texts are kept.
    """

    def __init__(self, root: Path, given: Mapping[str, Path], texts: Texts) -> None:
        self._root, self._texts = root, texts
        for name, folder in given.items():
            shutil.copytree(folder, root / name)
        os.environ.update(_ENVIRONMENT)
        (command,) = importlib.metadata.entry_points(group="console_scripts", name="draftquant")
        self._command = command.load()
        for module in _IMPORTED:
            importlib.import_module(module)

    def play(self, scenes: Sequence[Scene]) -> dict[str, Outcome]:
        """Outcomes by "scene/command", in the order of the file."""
        began = time.monotonic()
        waiting, playing, done = list(scenes), dict[int, str](), set[str]()
        while waiting or playing:
            ready = [scene for scene in waiting if done.issuperset(scene.after)]
            for scene in ready[: LANES - len(playing)]:
                waiting.remove(scene)
                playing[_forked(lambda scene=scene: self._play_one(scene))] = scene.name
            process, status = os.wait()
            if status:
                raise SystemExit(f"frozen: scene {playing[process]} could not be played")
            done.add(playing[process])
            print(f"{playing.pop(process)}: played after {time.monotonic() - began:.0f} s")
        found = {}
        for scene in scenes:
            own = read_outcomes(self._root / f"{scene.name}.outcomes")
            found |= {f"{scene.name}/{name}": outcome for name, outcome in own.items()}
        return found

    def _play_one(self, scene: Scene) -> int:
        """All commands of a scene; their outcomes are written beside its folder."""
        os.chdir(self._root)
        os.environ["DRAFTQUANT_CACHE"] = str(self._root / f"{scene.name}.cache")
        folder = self._root / scene.name
        folder.mkdir()
        for draft in scene.drafts:
            write_generated_draft(draft, folder / draft)
        for name in scene.made:
            MADE[name](folder / name)
        for name, text in (scene.files or {}).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        found = {}
        with served(scene.server, folder) if scene.server else nullcontext("") as url:
            for name, line in scene.commands.items():
                found[name] = self._outcome(folder, line.replace("{server}", url))
        write_outcomes(self._root / f"{scene.name}.outcomes", found)
        return 0

    def _outcome(self, folder: Path, line: str) -> Outcome:
        """Run a command; once more with --json, where it only reads and has not done so."""
        before = _files_of(folder)
        code, out, err = self._run(line)
        said = {"text": self._texts.keep(repeatable(out + err, self._root))}
        if " --json" in line:
            said = {"json": self._texts.keep(repeatable(out, self._root))}
        elif not _WRITES.search(line) and not _SAYS.match(line):
            again, out, _ = self._run(f"{line} --json")
            said["json"] = self._texts.keep(repeatable(out, self._root))
            if again != code:
                code = 1000 * code + again  # never expected: --json changes no exit code
        files = {
            str(path.relative_to(folder)): self._texts.keep_file(path, self._root)
            for path in _files_of(folder) - before
        }
        return Outcome(code, said, dict(sorted(files.items())))

    def _run(self, line: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `draftquant LINE`."""
        out, err = (self._root / f"{os.getpid()}.{name}" for name in ("stdout", "stderr"))

        def command() -> int:
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = ["draftquant", *shlex.split(line)]
            return int(self._command() or 0)

        _, status = os.waitpid(_forked(command), 0)
        texts = [path.read_text(encoding="utf-8") for path in (out, err)]
        return os.waitstatus_to_exitcode(status), texts[0], texts[1]


def _forked(call: Callable[[], int]) -> int:
    """Start a process that calls this and ends with what it returns; its number."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 250
    try:
        code = call()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except Exception:  # noqa: BLE001 - a fork ends here, whatever it raised
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}
