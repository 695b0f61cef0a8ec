"""Run the commands of commands.toml, and say what differs from expected.json.

./scripts/test --frozen                     every scene
./scripts/test --frozen llama mistakes      these scenes, and those whose folders they read
./scripts/test --frozen --accept NAME ...   what differs becomes the expectation: of a scene,
                                            of one command ("llama/gate"), or of all ("*")
"""

import argparse
import difflib
import fnmatch
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import arithmetic
from outcomes import Outcome, Texts, differences, read_outcomes, write_outcomes
from scenes import read_scenes, with_needed
from stage import Stage

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"
KEPT = HERE.parents[1] / "build" / "frozen"
_SHOWN = 40
"""Lines of a difference that are printed; the whole texts are in `KEPT`."""


def main() -> int:
    """Returns 0 if every outcome is as expected, else 1."""
    parser = argparse.ArgumentParser(prog="scripts/test --frozen")
    parser.add_argument("scenes", nargs="*", help="scenes to run (default: all)")
    parser.add_argument("--accept", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args()
    scenes = read_scenes(HERE / "commands.toml")
    if unknown := set(options.scenes) - set(scenes):
        parser.error(f"no such scene: {', '.join(sorted(unknown))}; there are {', '.join(scenes)}")
    began, texts = time.monotonic(), Texts(KEPT)
    # Of equal length everywhere: a path decides where a line breaks.
    with tempfile.TemporaryDirectory(prefix="frozen-", dir="/tmp") as folder:
        stage = Stage(Path(folder).resolve(), _given(), texts)
        found = {"arithmetic": Outcome(0, {"digest": arithmetic.probe()})}
        found |= stage.play(with_needed(scenes, options.scenes or list(scenes)))
    expected = read_outcomes(EXPECTED)
    gone = [] if options.scenes else [name for name in expected if name not in found]
    left = 0
    for name in (*found, *gone):
        now = found.get(name)
        different = differences(expected.get(name), now)
        if different and _is_accepted(name, options.accept):
            print(f"accepted {name}: {', '.join(different)}")
            expected = {key: value for key, value in expected.items() if key != name}
            expected |= {name: now} if now else {}
        elif different:
            if name == "arithmetic":
                print("this CPU computes other last digits than that of expected.json (README.md)")
            left += 1
            _show(name, different, texts)
    if options.accept:
        in_order = {name: expected[name] for name in found if name in expected}
        write_outcomes(EXPECTED, in_order | expected)
    seconds = time.monotonic() - began
    verdict = f"{left} differ" if left else "all as expected"
    print(f"frozen: {len(found)} commands in {seconds:.0f} s, {verdict}")
    return 1 if left else 0


def _given() -> dict[str, Path]:
    """Folders of the repository that the commands read, by the names that they have there."""
    pairs = {path.name: path for path in sorted((HERE.parent / "pairs").iterdir()) if path.is_dir()}
    return pairs | {"foreign": HERE.parent / "foreign"}


def _is_accepted(name: str, accepted: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, own) or name.startswith(f"{own}/") for own in accepted)


def _show(name: str, different: Mapping[str, tuple[str, str]], texts: Texts) -> None:
    """Print what differs, line by line where both texts are known on this machine."""
    print(f"\n{name} differs")
    for what, (before, now) in different.items():
        old, new = texts.find(before), texts.find(now)
        print(f"  {what}: expected {before[:16]}, got {now[:16]}")
        if new is None:
            continue
        if old is None:
            print(f"    the expected text is not known here; the new one is {KEPT / now}")
            continue
        lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1))
        for line in lines[2 : 2 + _SHOWN]:
            print(f"    {line[:200]}")
        if len(lines) > 2 + _SHOWN:
            print(f"    ... and {len(lines) - 2 - _SHOWN} lines more")


if __name__ == "__main__":
    sys.exit(main())
