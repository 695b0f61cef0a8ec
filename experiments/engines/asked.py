"""What installed engines answer to `draftquant check --ask`, for every recipe and family.

`experiments/run asked PYTHON...`: each interpreter has an engine, with kernels for this machine.
Writes asked.json and ASKED.md. Each question is a process forked after the engine was imported.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests")]

from draftquant.quantize.asked import Checking  # noqa: E402
from draftquant.quantize.asking.ask import Question  # noqa: E402
from draftquant.quantize.asking.asked_check import AskedCheck  # noqa: E402
from draftquant.quantize.asking.child_process import ANSWER, REQUEST  # noqa: E402
from draftquant.recipes import DraftQuantError  # noqa: E402

_FORKING = """
import os, sys, importlib
sys.path.insert(0, {inside!r})
from inside import answer
import torch
torch.set_num_threads(1)
importlib.import_module("inside.in_" + {engine!r})
if {engine!r} == "vllm":  # which looks at each class in a process of its own: a minute
    import vllm.model_executor.models.registry as registry
    registry._run_in_subprocess = lambda function: function()
for request in sys.argv[1:]:
    if os.fork() == 0:
        try:
            answer.main(request)
        finally:
            os._exit(0)
    os.wait()
"""


def ask_all(
    engine: str, python: str, folders: Sequence[Path], target: Path | None, log: Path | None = None
) -> Iterator[AskedCheck | DraftQuantError]:
    """The verdict of an engine on each folder, or why there is none."""
    inside = HERE.parents[1] / "quantize" / "asking"
    with tempfile.TemporaryDirectory() as temporary:
        questions: list[tuple[Path, Question | DraftQuantError]] = []
        for i, folder in enumerate(folders):
            work = Path(temporary) / str(i)
            work.mkdir()
            try:
                question = Question.of(Checking(folder, engine, ask=python, target=target))
                question.write(work)
            except DraftQuantError as exc:
                questions.append((work, exc))
            else:
                questions.append((work, question))
        requests = [str(w / REQUEST) for w, q in questions if isinstance(q, Question)]
        code = _FORKING.format(inside=str(inside), engine=engine)
        done = subprocess.run(
            [python, "-c", code, *requests],
            cwd=temporary,
            capture_output=True,
            text=True,
            check=False,
        )
        if log is not None:
            log.write_text(done.stdout + done.stderr, encoding="utf-8")
        for work, question in questions:
            if isinstance(question, DraftQuantError):
                yield question
                continue
            answer: dict[str, Any] = {"stage": "start"}
            for line in (work / ANSWER).read_text(encoding="utf-8").splitlines():
                answer |= json.loads(line)
            try:
                yield question.judged(answer, work, python=python, seconds=0)
            except DraftQuantError as exc:
                yield exc
