"""`check --ask`: an installed engine loads a draft in a process of its own, and is judged."""

import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from ...recipes.brief import first_of
from ...recipes.errors import CheckpointError, DeviceError, DraftQuantError
from ..asked import Checking
from ..engines.contract import TITLES, Verdict, explained
from ..engines.engine_check import check_checkpoint
from ..files.checkpoint import Checkpoint
from ..files.digests import tensor_digests, tensors_sha256
from ..files.hub import resolve_draft, resolve_target
from ..stored.layouts import HF_QUANT_CONFIG
from ..stored.stored_draft import StoredDraft
from .asked_check import AskedCheck
from .child_process import ANSWER, REQUEST, Answer, run_child
from .given_folder import write_given
from .linear_judge import judge, random_inputs
from .smallest_target import write_target

_OUTPUTS = "outputs.safetensors"
_LISTS = ("unloaded", "unread", "cast", "merged")
_ANOTHER = (
    "ask on the machine that will serve, with its GPU, or another version; without --ask, rows of"
    " known versions answer"
)
_NOT_SO = (
    "do not serve it so: where 'draftquant verify' finds the folder right, the engine is wrong; use"
    " another recipe or version"
)
_OTHERWISE = "quantize with another recipe: 'draftquant recipes list --engine {}'"
_TRIED = {"vllm": "0.21 to 0.33", "sglang": "0.5.19 to 0.5.23"}
"""The versions that `asking/inside` was run with."""
_SAME = 60  # characters by which errors are alike


def ask_engine(asked: Checking) -> AskedCheck:
    """Start the engine's interpreter, let it load the draft, and judge what it answers.

    Raises:
        CheckpointError: the folder is no draft, does not fit its target, or changed.
        DeviceError: the engine is not there, is unknown to us, crashed, or took too long.
    """
    question, python = DraftQuestion.of(asked), _interpreter(Path(str(asked.ask)))
    with tempfile.TemporaryDirectory(prefix="draftquant-ask-") as temporary:
        work = Path(temporary)
        before = _state_of(question.folder)
        left_out = question.write(work)
        began = time.perf_counter()
        answer = run_child(python, work, asked.ask_seconds)
        seconds = time.perf_counter() - began
        if _state_of(question.folder) != before:
            what = "its files changed while the engine was asked"
            raise CheckpointError(question.folder, what, fix="ask again when nobody writes there")
        found = question.judged(answer, work, python=python, seconds=seconds)
        return replace(found, left_out=left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftQuestion:
    """One draft for one engine.

    Attributes:
        problem: why its linears cannot be decoded; the engine may take it nevertheless.
    """

    asked: Checking
    folder: Path
    stored: StoredDraft
    problem: str | None

    @classmethod
    def of(cls, asked: Checking) -> "DraftQuestion":
        """Read the folder; CheckpointError where it is no draft."""
        folder = resolve_draft(str(asked.draft)).folder
        checkpoint = Checkpoint.open(folder)
        try:
            stored, problem = StoredDraft.read(checkpoint), None
        except DraftQuantError as exc:
            stored, problem = StoredDraft.look(checkpoint), f"{exc.where}: {exc.what}"
        return cls(asked=asked, folder=folder, stored=stored, problem=problem)

    def write(self, work: Path) -> tuple[str, ...]:
        """Write what the child reads; returns the code of both folders, which it does not get."""
        asked, stored = self.asked, self.stored
        target, given = work / "target", work / "draft"
        target.mkdir()
        theirs = None if asked.target is None else resolve_target(str(asked.target))
        left_out = write_given(self.folder, given)
        left_out += write_target(target, stored, theirs, asked.target_layers)
        widths, codes = {}, {}
        for row in stored.draft.rows if self.problem is None else ():
            scheme = stored.scheme_of(row)
            if scheme is not None:
                widths[row.module] = row.tensor.shape[1]
                codes[f"{row.module}.{scheme.layout.weight_suffix(scheme)}"] = row.module
        inputs = work / "inputs.safetensors"
        save_file({str(width): random_inputs(width) for width in set(widths.values())}, inputs)
        request = {
            "engine": asked.engine, "draft": str(given), "target": str(target),
            "codes": codes, "widths": widths, "inputs": str(inputs),
            "outputs": str(work / _OUTPUTS), "answer": str(work / ANSWER),
        }  # fmt: skip
        (work / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        return left_out

    def judged(self, answer: Answer, work: Path, *, python: str, seconds: float) -> AskedCheck:
        """The verdict; DeviceError where the engine could not be asked, which is none."""
        self._refuse_no_answer(answer, f"--ask {python}")
        lines = answer.get("linears", ())
        linears = tuple(judge(self.stored, lines, load_file(work / _OUTPUTS))) if lines else ()
        lists = {name: tuple(answer[name]) for name in _LISTS}
        verdict, error, remedy = self._verdict(answer)
        if verdict != "REFUSED" and (any(lists.values()) or not all(e.is_right for e in linears)):
            verdict, error, remedy = "LOADS BUT WRONG", None, _NOT_SO
        return AskedCheck(
            engine=self._engine,
            version=answer["version"],
            python=python,
            device=answer["device"],
            draft_sha256=tensors_sha256(tensor_digests(self.stored.checkpoint)),
            verdict=verdict,
            stage=answer["stage"],
            error=error,
            remedy=remedy,
            linears=linears,
            not_run=answer["not_run"],
            schemes=answer["schemes"],
            seconds=round(seconds, 1),
            memory=answer["memory"],
            **lists,
        )

    @property
    def _engine(self) -> Any:
        return self.asked.engine

    def _verdict(self, answer: Answer) -> tuple[Verdict, str | None, str | None]:
        """By the engine's error, and by whether there was something to compare."""
        title, raw = TITLES[self._engine], answer.get("error")
        if raw is not None:
            error = explained(raw, engine=title, gpu=answer["device"])
            return "REFUSED", error, self._known_remedy(raw) or _OTHERWISE.format(self._engine)
        if self.problem is not None:
            return "UNKNOWN", self.problem, "see 'draftquant verify' of the folder"
        return "LOADS", None, None

    def _known_remedy(self, raw: str) -> str | None:
        """What to do about an error that the rows of the newest known version have too."""
        checkpoint = self.stored.checkpoint
        side_file = (self.folder / HF_QUANT_CONFIG).is_file()
        known = check_checkpoint(checkpoint, engine=self._engine, has_side_file=side_file)
        alike = (each.remedy for each in known.findings if raw[:_SAME] in each.text)
        return next(alike, None)

    def _refuse_no_answer(self, answer: Answer, where: str) -> None:
        printed, title = answer.get("printed", ()), TITLES[self._engine]
        if missing := answer.get("missing"):
            what = f"expected {title} with torch, safetensors and transformers; cannot be imported"
            raise DeviceError(
                where,
                f"{what}: {', '.join(missing)}",
                fix=f"give the python of the environment that serves with {title}",
                details=printed,
            )
        found, stage = f"{title} {answer.get('version', '')}".strip(), answer["stage"]
        if unknown := answer.get("unknown"):
            what = f"expected the interfaces of {title} {_TRIED[self._engine]}, got {found}, which"
            raise DeviceError(
                where,
                f"{what} lacks them, or wants other arguments: {first_of(unknown, 6)}",
                fix="ask one of these versions; without --ask, rows of known versions answer",
                details=printed,
            )
        if answer.get("out_of_memory"):
            what = f"{found} finds too little memory on its GPU ({stage}): {answer['error']}"
            fix = "end what else runs there, or choose another GPU, such as CUDA_VISIBLE_DEVICES=1"
            raise DeviceError(where, what, fix=fix)
        if "error" in answer and stage == "target":
            what = f"{found} does not take the config.json of the target: {answer['error']}"
            fix = "give --target; a target that needs code of its own cannot be asked about"
            raise DeviceError(where, what, fix=fix)
        if "schemes" not in answer or ("error" in answer and stage == "engine"):
            what = f"{found} did not start ({stage}): {answer.get('error', 'it said nothing')}"
            raise DeviceError(where, what, fix=_ANOTHER, details=printed)


def _interpreter(given: Path) -> str:
    """The interpreter that is meant; of an environment's folder, its own."""
    path = given.expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    return str(path.absolute()) if path.exists() else str(given)


def _state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    stats = ((path, path.stat()) for path in folder.iterdir())
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats}
