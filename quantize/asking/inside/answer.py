"""What the child does: one draft, one engine, one answer.

`DraftQuestion.write` says what it reads. It writes lines of JSON: each stage that it enters, and at
the end everything.
"""

import importlib
import json
import os
import re
import resource
import sys
import traceback
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_TAIL = re.compile(
    r" The available parameters| Weight config:|: dict_keys| Must be one of|, weight_quant="
)
"""Where errors begin to list what they know; some in another order each time."""


def main(request_file: str) -> None:
    """Answer; an exit status other than 0 is a crash."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    with Path(request["answer"]).open("a", encoding="utf-8") as stream:

        def say(**answer: object) -> None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()

        say(stage="engine")
        needed = ("torch", "safetensors", "transformers", request["engine"])
        if missing := [name for name in needed if not find_spec(name)]:
            say(missing=missing)
            return
        say(**_answer(request, say))


def _answer(request: "dict[str, Any]", say: Any) -> "dict[str, Any]":
    engine = importlib.import_module(f".in_{request['engine']}", __package__)
    os.environ.update(engine.ENVIRONMENT)
    found = installed_version(engine.NAME)
    if found is None:
        return {"missing": [engine.NAME]}
    unknown = _unknown_interfaces(engine)
    if unknown:
        return {"version": found, "unknown": unknown}
    from .loaded_model import Outcome, out_of_memory

    class Told(Outcome):
        """Each stage is written at once: the process may die in it."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "stage":
                say(stage=value)

    outcome = Told()
    answer: dict[str, Any] = {"version": found}
    try:
        with ExitStack() as stack:
            _examine(engine, request, outcome, answer, stack)
    except Exception as exc:  # noqa: BLE001  whatever an engine raises is its answer
        traceback.print_exc()
        answer["error"] = text_of(exc, engine.NAME).replace(request["draft"], "DRAFT")
        answer["out_of_memory"] = out_of_memory(exc)
        where = traceback.extract_tb(exc.__traceback__)[-1]
        ours = Path(where.filename).parent == Path(__file__).parent
        if ours and not isinstance(exc, RuntimeError):  # torch's own, of the draft's tensors
            answer["unknown"] = [f"{where.name}: {answer['error']}"]  # we called it wrongly
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**answer, "memory": memory, **asdict(outcome)}


def _examine(
    engine: Any, request: "dict[str, Any]", outcome: Any, answer: Any, stack: ExitStack
) -> None:
    from safetensors.torch import load_file, save_file

    from .loaded_model import examine
    from .running import run_linears

    draft, target = Path(request["draft"]), Path(request["target"])
    engine.start(stack)
    answer["device"] = engine.device()
    outcome.stage = "target"
    engine.speculating(target)
    outcome.stage = "config"
    subject = engine.subject(draft, target)
    with subject.context:
        model = examine(subject, outcome)
        if model is None:
            outcome.stage = "loaded"
            return
        outcome.stage = "run"
        inputs = {int(width): x for width, x in load_file(request["inputs"]).items()}
        answer["linears"], outputs, left = run_linears(
            model, outcome.filled, request["codes"], inputs, request["widths"], subject.needs_gpu
        )
        outcome.not_run = {**outcome.not_run, **left}
        save_file(outputs, request["outputs"])
    outcome.stage = "loaded"


def installed_version(engine: str) -> "str | None":
    """Its version; None where it cannot be imported."""
    try:
        return str(getattr(importlib.import_module(engine), "__version__", "of unknown version"))
    except ImportError:
        traceback.print_exc()
        return None


def _unknown_interfaces(engine: Any) -> "list[str]":
    """The names that are used of the engine and are not there."""
    absent = []
    for module, names in engine.NEEDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            traceback.print_exc()
            found = None
        absent += [f"{module}.{name}" for name in names.split() if not hasattr(found, name)]
    return absent


def text_of(exc: Exception, engine: str) -> str:
    """The engine's own words, shortened; of a bare assertion, the line that failed."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    if not lines:
        frame = traceback.extract_tb(exc.__traceback__)[-1]
        module = re.sub(rf".*/{engine}/", f"{engine}/", frame.filename)
        lines = [f"{module}:{frame.lineno}: {frame.line}"]
    text = " ".join(lines[:3])
    return f"{type(exc).__name__}: {_TAIL.split(text)[0][:300]}"


if __name__ == "__main__":
    main(sys.argv[1])
