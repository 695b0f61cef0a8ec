"""What a command did: its exit code, and the sha256 of all that it said and wrote.

Before a text is hashed, what differs from run to run is taken out of it (README.md lists it).
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

_TEXTS = {".json", ".jsonl", ".html", ".md", ".xml", ".yaml", ".yml", ".svg", ".txt", ".py", ""}
_WHOLE = r"(?<![\w.])"
_TIMES = (
    r"tokens_per_second|write|verify|sync|start|began|latency"
    r"|time_to_first_token|time_per_output_token"
)
_VERSIONS = "draftquant|python|torch|transformers|numpy|scipy|safetensors"
_TAKEN_OUT = (
    (re.compile(r"127\.0\.0\.1:\d+"), "SERVER"),
    (re.compile(_WHOLE + r"\d+(?:\.\d+)? ?s\b"), "TIME"),
    (re.compile(_WHOLE + r"\d+(?:\.\d+)? min\b"), "TIME"),
    (re.compile(_WHOLE + r"[\d,]+(?:\.\d+)? tokens/s"), "SPEED"),
    (re.compile(rf'("(?:{_TIMES})": )[-\d.e+]+'), r"\1TIME"),
    (re.compile(rf'("(?:{_VERSIONS})": )"[^"]+"'), r"\1VERSION"),
    (re.compile(r"\bdraftquant \d+\.\d+\.\d+"), "draftquant VERSION"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|\+00:00| UTC)?"), "DATE"),
    (re.compile(r"\d{4}-\d\d-\d\d at \d\d:\d\d UTC"), "DATE"),
    (re.compile(r"\.[\w-]+\.\d+-\d+-[0-9a-f]{12}\.staging"), "STAGING"),
    (re.compile(r"\b[0-9a-f]{16}-[0-9a-f]{32}\.safetensors"), "STATES"),
)
_PROGRESS = r"[^:\n]+(?: \d\.\d+)?: (?:\d+% after|done in|running for|\d+ in|[\d,.]+ MB in) .*"
_LINES = re.compile(rf"^(?:{_PROGRESS}|memory (?:on|of) .*)\n", re.MULTILINE)
_LONG = re.compile(_WHOLE + r"-?\d+\.\d{7,}(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one command; every digest is a sha256.

    Attributes:
        exit: the exit code.
        said: digests by "text" (stdout, then stderr) and "json" (stdout of --json).
        files: digests by path, relative to the folder of the scene.
    """

    exit: int
    said: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def flat(self) -> dict[str, str]:
        """All of it by name."""
        return {"exit code": str(self.exit), **self.said, **self.files}


def differences(before: Outcome | None, now: Outcome | None) -> dict[str, tuple[str, str]]:
    """What differs, by name: the value before and the value now; None = the command did not run."""
    old, new = (outcome.flat() if outcome else {} for outcome in (before, now))
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return {name: (old.get(name, "nothing"), new.get(name, "nothing")) for name in names}


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Outcomes by command; none, if there is no such file."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: Outcome(**outcome) for name, outcome in found.items()}


def write_outcomes(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write them in this order, a digest a line, so that a change is a small difference."""
    found = {name: asdict(outcome) for name, outcome in outcomes.items()}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


class Texts:
    """Texts by digest, kept between runs, so that a difference can be shown line by line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, text: str) -> str:
        """The digest of a text, which is kept under it."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        (self._folder / digest).write_text(text, encoding="utf-8")
        return digest

    def find(self, digest: str) -> str | None:
        """The text, if any run on this machine has met it."""
        path = self._folder / digest
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def keep_file(self, path: Path, root: Path) -> str:
        """The digest of a file: of a text as `repeatable` has it, of any other its bytes."""
        data = path.read_bytes()
        if path.suffix in _TEXTS:
            try:
                return self.keep(repeatable(data.decode(), root))
            except UnicodeDecodeError:
                pass
        return hashlib.sha256(data).hexdigest()


def repeatable(text: str, root: Path) -> str:
    """The text without what differs from run to run; `root` is "."; long fractions are rounded."""
    text = _LINES.sub("", text.replace(str(root), "."))
    for pattern, stand_in in _TAKEN_OUT:
        text = pattern.sub(stand_in, text)
    return _LONG.sub(lambda found: f"{float(found[0]):.9g}", text)
