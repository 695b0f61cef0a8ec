"""`AskedCheck`: what an installed engine did with a draft, and how people read it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...recipes.brief import Brief, counted
from ...recipes.errors import GateError, short
from ...recipes.regular_file import AnyPath, read_text
from ...recipes.schema import EngineName
from ...recipes.strict_json import JsonProblem, parse_object
from ..engines.contract import EXIT_CODES, TITLES, Verdict

if TYPE_CHECKING:
    from .linear_judge import AskedLinear


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AskedCheck(Brief):
    """What an installed engine did with a draft.

    Attributes:
        draft_sha256: of its tensors, as reports of the gate know it.
        verdict: UNKNOWN where the folder's linears cannot be decoded here.
        stage: the last one of config, init, load, after load, run, loaded.
        error: what it means, then the engine's own text in brackets.
        unloaded: parameters that no tensor filled. unread: tensors that filled none.
        cast: "tensor: dtype -> dtype of its parameter". merged: scales of parts that became one.
        left_out: code of the folders, which the engine was not given.
        linears: those that were run. not_run: module -> why not. schemes: module -> classes.
        memory: the engine's largest, in bytes.
    """

    engine: EngineName
    version: str
    python: str
    device: str
    draft_sha256: str
    verdict: Verdict
    stage: str
    error: str | None
    remedy: str | None
    unloaded: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    linears: "tuple[AskedLinear, ...]"
    not_run: Mapping[str, str] | None
    schemes: Mapping[str, str] | None
    seconds: float
    memory: int

    @property
    def exit_code(self) -> int:
        """0 LOADS, 1 LOADS BUT WRONG or REFUSED, 3 UNKNOWN."""
        return EXIT_CODES[self.verdict]

    @property
    def title(self) -> str:
        """The engine, its version and environment."""
        return f"{TITLES[self.engine]} {self.version} in {_environment(self.python)}"

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        start = f"{self.title} on {self.device}"
        if self.verdict == "REFUSED":
            return f"{start} ends with an error ({self.stage}): {self.error}"
        if self.verdict == "UNKNOWN":
            return f"{start} loaded this draft; its linears were not compared: {self.error}"
        loaded = f"{start} loaded this draft"
        wrong = [each for each in self.linears if not each.is_right]
        if self.verdict == "LOADS BUT WRONG":
            if not wrong:
                return f"{loaded}, and not all of it arrived"
            of = f"{len(wrong)} of {counted(len(self.linears), 'linear')}"
            return f"{loaded}, and {of} compute something else than the folder says"
        if not self.linears:
            return f"{loaded}, which has no quantized linear that could be run"
        largest = max(each.error for each in self.linears)
        each = f"each of {counted(len(self.linears), 'linear')} computes what the folder says"
        return f"{loaded}, and {each} (largest error {largest:.1%})"

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**asdict(self), "sentence": self.sentence}

    @override
    def brief(self) -> Mapping[str, object]:
        return {"verdict": self.verdict, "engine": self.title, "on": self.device,
                "why": self.error, "remedy": self.remedy}  # fmt: skip


def answer_about(draft_sha256: str, file: AnyPath) -> str:
    """The verdict in one line, from a file with what `--json` printed about this draft.

    GateError: the file is something else, or is about another draft.
    """
    where, again = f"--asked {file}", "write it with draftquant check QUANT --engine E --ask --json"
    try:
        said = parse_object(read_text(Path(file)))
    except (OSError, JsonProblem) as exc:
        raise GateError(where, f"cannot be read: {exc}", fix=again) from exc
    verdict, sentence, about = map(said.get, ("verdict", "sentence", "draft_sha256"))
    if verdict not in tuple(EXIT_CODES) or not isinstance(sentence, str) or about is None:
        what = "expected verdict, sentence and draft_sha256 of an engine that was asked, got"
        raise GateError(
            where, f"{what} {short(verdict)}, {short(sentence)} and {short(about)}", fix=again
        )
    if about != draft_sha256:
        what = f"expected an answer about QUANT, whose tensors have sha256 {draft_sha256}"
        raise GateError(where, f"{what}, got {short(about)}", fix=again)
    return f"{verdict}: {sentence}"


def _environment(python: str) -> str:
    """The folder of a virtual environment, as people call it."""
    path = Path(python)
    root = path.parent.parent
    return root.name if (root / "pyvenv.cfg").exists() else python
