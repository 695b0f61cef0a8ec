"""What of a recording is done: a folder beside the output, which a run that dies leaves behind.

It holds:

    OUT.recording/
        recording.json        what is recorded; another command is refused
        states/               where the engine writes, if it is our own
        00000.safetensors     hidden states of the first prompt, as the engine wrote them
        00000.json            its answer; written last, so that it says that the prompt is done
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...quantize.files.resumable import resumable_folder, write_whole
from ...recipes.errors import short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import TraceError
from ..prompts.prompt_file import Prompt
from ..traces.manifest import LogprobSpec
from .server_answers import Answer
from .states_file import FAILED, ExpectedStates, check_states

RECORDING = ".recording"
"""Behind the name of the output."""
_PLAN_FILE = "recording.json"
_WAIT = 120.0  # seconds, for a file that an answer names
_POLL = 0.02


class KeptRecording:
    """The folder; made by `kept_recording`.

    Args:
        folder: where it lies.
        prompts: all of the recording, by position.
        max_new_tokens: tokens per prompt.
        logprobs: that each answer must have; None = none are needed.
    """

    def __init__(
        self,
        folder: Path,
        prompts: Sequence[Prompt],
        expected: ExpectedStates,
        *,
        max_new_tokens: int,
        vocab_size: int,
        logprobs: LogprobSpec | None,
    ) -> None:
        self._asked = logprobs
        self.states_folder = folder / "states"
        self._folder = folder
        self._prompts = prompts
        self._expected = expected
        self._max_new_tokens = max_new_tokens
        self._vocab_size = vocab_size

    def missing(self) -> list[int]:
        """Positions that have no answer yet."""
        done = _answered(self._folder)
        return [i for i in range(len(self._prompts)) if f"{i:05d}.json" not in done]

    def take(self, position: int, answer: Answer, shared: Path) -> None:
        """Check an answer, wait for its states, and keep both.

        Args:
            shared: folder that the engine writes into; the file is moved away from there.

        Raises:
            TraceError: the answer or the file is not what was asked for, or no file comes.
        """
        self._check(position, answer)
        prompt = self._prompts[position]
        written = shared / _file_name(answer.states, prompt)
        _wait_for(written, prompt)
        read = [*prompt.token_ids, *answer.token_ids[:-1]]
        engine = check_states(written, self._expected, read)
        shutil.move(written, self.states(position))
        text = json.dumps(dataclasses.asdict(answer) | {"engine": engine})
        write_whole(self._folder / f"{position:05d}.json", text)

    def answer(self, position: int) -> tuple[Answer, str]:
        """What was kept of a prompt, and the engine that gave it.

        Raises:
            TraceError: the folder was changed by others.
        """
        path = self._folder / f"{position:05d}.json"
        try:
            kept: _Kept = decode(_Kept, parse_object(read_text(path)))
        except (OSError, JsonProblem) as exc:
            raise TraceError(path, f"this is not an answer of an unfinished run: {exc}",
                             fix=f"rm {path}, and run again") from exc  # fmt: skip
        answer = kept.answer()
        self._check(position, answer)
        read = [*self._prompts[position].token_ids, *answer.token_ids[:-1]]
        check_states(self.states(position), self._expected, read)
        return answer, kept.engine

    def states(self, position: int) -> Path:
        """The file of a prompt's hidden states."""
        return self._folder / f"{position:05d}.safetensors"

    def _check(self, position: int, answer: Answer) -> None:
        where = f"prompt {self._prompts[position].id}"
        count = len(answer.token_ids)
        if answer.ended not in ("stop", "length"):
            raise TraceError(where, f"the engine ended it with {short(answer.ended)}",
                             fix="see the engine's own messages")  # fmt: skip
        wrong = count < 1 or count > self._max_new_tokens
        if wrong or (answer.ended == "length" and count != self._max_new_tokens):
            raise TraceError(
                where,
                f"asked for {self._max_new_tokens} tokens, got {count} and {answer.ended!r}",
                fix="start the engine without a limit of its own, such as max_new_tokens in"
                " --override-generation-config",
            )
        if not all(0 <= token < self._vocab_size for token in answer.token_ids):
            raise TraceError(where, f"expected token ids in [0, {self._vocab_size})",
                             fix="serve the target that is given here")  # fmt: skip
        if self._asked is not None:
            given = len(answer.token_logprob or ())
            places = [len(place) for place in answer.top or ()]
            num_top = self._asked.num_top
            if given != count or places != [num_top] * (count if num_top else 0):
                raise TraceError(
                    where,
                    f"asked for log-probabilities of {count} tokens and of {num_top} beside each,"
                    f" got {given} and {short(places)}",
                    fix="start the engine with at least this --max-logprobs",
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """An answer's JSON: `Answer`, and who gave it."""

    token_ids: tuple[int, ...]
    ended: str
    states: str
    token_logprob: tuple[float, ...] | None
    top: tuple[tuple[tuple[float, ...], ...], ...] | None
    engine: str

    def answer(self) -> Answer:
        top = None
        if self.top is not None:
            top = tuple(tuple((int(token), v) for token, v in place) for place in self.top)
        return Answer(
            token_ids=self.token_ids,
            ended="stop" if self.ended == "stop" else "length",
            states=self.states,
            token_logprob=self.token_logprob,
            top=top,
        )


@contextmanager
def kept_recording(out: Path, plan: Mapping[str, Any]) -> Iterator[Path]:
    """Begin a recording, or go on with the one of the same plan; nobody else has it meanwhile.

    Args:
        plan: what is recorded, as JSON says it.

    Raises:
        OutputError: another plan was begun there, or another process is at it.
    """
    folder = out.with_name(out.name + RECORDING)
    with resumable_folder(folder, "recording", plan):
        try:
            yield folder
        finally:
            if not _answered(folder):  # nothing to go on with
                shutil.rmtree(folder, ignore_errors=True)


def _answered(folder: Path) -> set[str]:
    """Names of the answers in a folder."""
    return {path.name for path in folder.glob("*.json")} - {_PLAN_FILE}


def _file_name(name: str, prompt: Prompt) -> str:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise TraceError(
            f"prompt {prompt.id}",
            f"expected the answer to name a file of hidden states, got {short(name)}",
            fix="start the engine with the arguments of 'draftquant record --print-server-args'",
        )
    return name


def _wait_for(path: Path, prompt: Prompt) -> None:
    failed = path.with_suffix(FAILED)
    end = time.monotonic() + _WAIT
    while not path.exists():
        if failed.exists():
            raise TraceError(f"prompt {prompt.id}", f"the engine lost its states: {_why(failed)}",
                             fix="see the engine's own messages, and run again")  # fmt: skip
        if time.monotonic() > end:
            raise TraceError(
                path,
                f"did not appear within {_WAIT:.0f} seconds after the answer to prompt {prompt.id}",
                fix="give --shared the folder that the engine's machine writes into",
            )
        time.sleep(_POLL)


def _why(failed: Path) -> str:
    try:
        return read_text(failed)
    except OSError as exc:
        return str(exc)
