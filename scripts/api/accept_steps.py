"""The steps of an acceptance: each calls one verb, writes one output, and reads what it says.

The order is that of what a step costs, and of what the next ones need.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quantize.engines.contract import EngineCheck
from ...quantize.engines.registry import newest_engines
from ...quantize.gpus import architecture
from . import accept_found as found
from .accept_inputs import BF16, PLAIN, QUANTIZED, TRACES, Given, hash_of
from .check import CheckSettings, check
from .engine_verdicts import to_mapping
from .gate import GateSettings, gate
from .measure import MeasureSettings, measure
from .parity_divergence import DivergenceSettings, parity_divergence
from .parity_draft import DraftParitySettings, parity_draft
from .parity_run_tasks import RunTasksSettings, parity_run_tasks
from .parity_tasks import TasksSettings, parity_tasks
from .record import record
from .record_settings import RecordSettings
from .settings import Settings
from .verb import Verb
from .verify import VerifySettings, verify

if TYPE_CHECKING:
    from ...validate.acceptance.acceptance import StepFound
    from ...validate.acceptance.journal import Inputs

GATE = "gate.json"
PARITY = ("parity-draft.json", "parity-texts.json", "parity-tasks.json")
_TASKS = ("tasks-bf16", "tasks-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        name: of the verb, and on what. what: it looks at, for who waits.
        output: the file or folder that it makes, by its name.
        inputs: what its output depends on; asked when the steps before are done.
        run: makes the output at a path, whole or not at all.
        found: what an output says.
        ends: a FAIL ends the acceptance, as what follows would cost more than it could say.
    """

    name: str
    what: str
    output: str
    inputs: "Callable[[], Inputs]"
    run: Callable[[Path], object]
    found: "Callable[[Path], StepFound]"
    ends: bool = False


def steps_of(given: Given) -> Iterator[Step]:
    """All steps, in their order."""
    settings = given.settings
    yield _check(given)
    yield _verify(given)
    if settings.records:
        yield _record(given)
    if settings.server:
        yield from _measure(given)
    yield _gate(given)
    if given.traces is not None:
        yield _parity_draft(given, given.traces)
    if settings.plain_server:
        yield _parity_texts(given)
    if settings.tasks:
        yield from _parity_tasks(given)


def _carried_out(verb: "Verb[..., Any, Any]", settings: Settings) -> Any:
    """A verb by settings, which are looked at as those of a command line are."""
    settings.check()
    return verb.run(settings)


def _check(given: Given) -> Step:
    from ...validate.acceptance.step_file import read_step, write_step

    def run(path: Path) -> None:
        answers = tuple(_answers(given))
        write_step(path, found.checked(answers, path.name), {"engines": to_mapping(answers)})

    return Step(
        name="check",
        what="what engines do with the quantized draft",
        output="check.json",
        inputs=lambda: {
            "QUANT": given.quantized_sha256,
            **given.options("engine", "arch", "tp"),
        },
        run=run,
        found=read_step,
        ends=True,
    )


def _answers(given: Given) -> Iterator[EngineCheck]:
    """Of the newest version of each engine, or of the one that is asked for, on each GPU."""
    settings = given.settings
    wanted = None if settings.arch is None else architecture(settings.arch)
    for engine in newest_engines():
        if settings.engine not in (None, engine.name):
            continue
        for arch in engine.archs if wanted is None else [wanted]:
            asked = CheckSettings(
                draft=settings.quantized, engine=engine.name, arch=arch, tp=settings.tp
            )
            yield _carried_out(check, asked).answer


def _verify(given: Given) -> Step:
    from ...validate.acceptance.step_file import read_step, write_step

    settings = given.settings

    def run(path: Path) -> None:
        asked = VerifySettings(
            output=settings.quantized,
            against=settings.draft,
            foreign=settings.foreign,
            target=given.target,
            watch=settings.watch,
        )
        report = _carried_out(verify, asked)
        write_step(path, found.verified(report, path.name), report.to_mapping())

    return Step(
        name="verify",
        what="every byte of the quantized draft, against the BF16 draft",
        output="verify.json",
        inputs=lambda: {**given.drafts(), **given.options("foreign")},
        run=run,
        found=read_step,
        ends=True,
    )


def _record(given: Given) -> Step:
    settings = given.settings

    def run(path: Path) -> None:
        asked = RecordSettings(
            target=given.target,
            prompts=given.prompts,
            out=path,
            draft=settings.draft,
            max_new_tokens=settings.max_new_tokens,
            device=settings.device,
            watch=settings.watch,
        )
        _carried_out(record, asked)

    return Step(
        name="record",
        what="the target on the prompts",
        output=TRACES,
        inputs=lambda: {
            "DRAFT": given.draft_sha256,
            "--target": given.target_sha256,
            "--prompts": hash_of(given.prompts),
            **given.options("max_new_tokens"),
        },
        run=run,
        found=found.recorded,
    )


def _measure(given: Given) -> Iterator[Step]:
    """Of each server."""
    settings = given.settings
    assert settings.server is not None  # or there is nothing to measure
    bf16, quantized = settings.server
    bf16_name, quantized_name = settings.served_as or (None, None)
    yield _measure_one(given, "BF16", BF16, bf16, draft=settings.draft, served_as=bf16_name)
    yield _measure_one(
        given, "QUANT", QUANTIZED, quantized, draft=settings.quantized, served_as=quantized_name
    )
    if settings.plain_server:
        # Its two most likely tokens show where texts may part.
        yield _measure_one(given, "plain", PLAIN, settings.plain_server, top_logprobs=2)


def _measure_one(given: Given, name: str, output: str, url: str, **own: Any) -> Step:
    settings = given.settings
    step = f"measure {name}"

    def run(path: Path) -> None:
        asked = MeasureSettings(
            server=url,
            engine=settings.engine,
            prompts=given.prompts,
            out=path,
            tokenizer=given.target,
            max_new_tokens=settings.max_new_tokens,
            watch=settings.watch,
            **own,
        )
        _carried_out(measure, asked)

    def inputs() -> "Inputs":
        hashes = {"BF16": given.draft_sha256, "QUANT": given.quantized_sha256}
        return {
            "draft": hashes.get(name),
            "--target": given.target_sha256,
            "--prompts": hash_of(given.prompts),
            **given.options("engine", "max_new_tokens"),
        }

    return Step(
        name=step,
        what=url,
        output=output,
        inputs=inputs,
        run=run,
        found=partial(found.measured, step),
    )


def _gate(given: Given) -> Step:
    settings = given.settings
    shared = "policy", "max_relative_drop", "foreign"
    replayed = "num_draft_tokens", "dtype"

    def run(path: Path) -> None:
        on_traces: dict[str, Any] = {}
        if given.traces is not None:
            on_traces = {
                "baseline": settings.draft,
                "candidate": settings.quantized,
                "traces": given.traces,
                "target": given.target,
                "num_draft_tokens": settings.num_draft_tokens,
                "device": settings.device,
                "dtype": settings.dtype,
            }
        asked = GateSettings(
            **on_traces,
            measured=given.measured,
            parity=settings.parity,
            policy=settings.policy,
            max_relative_drop=settings.max_relative_drop,
            unrecorded=settings.foreign,
            report=path,
            watch=settings.watch,
        )
        _carried_out(gate, asked)

    return Step(
        name="gate",
        what="what both drafts are accepted, and the verdict",
        output=GATE,
        inputs=lambda: {
            **given.evidence(),
            **{f"--parity {path}": hash_of(Path(path)) for path in settings.parity},
            **given.options(*shared, *(replayed if given.traces is not None else ())),
        },
        run=run,
        found=found.gated,
    )


def _parity_draft(given: Given, traces: Path) -> Step:
    settings = given.settings

    def run(path: Path) -> None:
        asked = DraftParitySettings(
            baseline=settings.draft,
            candidate=settings.quantized,
            traces=traces,
            num_draft_tokens=settings.num_draft_tokens,
            target=given.target,
            device=settings.device,
            dtype=settings.dtype,
            report=path,
            watch=settings.watch,
        )
        _carried_out(parity_draft, asked)

    return Step(
        name="parity draft",
        what="what both drafts propose",
        output=PARITY[0],
        inputs=lambda: {**given.evidence(), **given.options("num_draft_tokens", "dtype")},
        run=run,
        found=partial(found.compared, "parity draft"),
    )


def _parity_texts(given: Given) -> Step:
    def run(path: Path) -> None:
        plain, bf16, quantized = (path.with_name(name) for name in (PLAIN, BF16, QUANTIZED))
        asked = DivergenceSettings(
            plain=plain, speculative=(bf16, quantized), report=path, watch=given.settings.watch
        )
        _carried_out(parity_divergence, asked)

    return Step(
        name="parity texts",
        what="the text of both servers, against that of the target alone",
        output=PARITY[1],
        inputs=lambda: {**given.evidence(), "plain measured": hash_of(given.folder / PLAIN)},
        run=run,
        found=partial(found.compared, "parity texts"),
    )


def _parity_tasks(given: Given) -> Iterator[Step]:
    settings = given.settings
    names = ("tasks BF16", "tasks QUANT")
    assert settings.server is not None  # see `AcceptSettings.check`
    for name, output, url in zip(names, _TASKS, settings.server, strict=True):
        yield _run_tasks(given, name, output, url)

    def run(path: Path) -> None:
        first, second = (path.with_name(name) for name in _TASKS)
        asked = TasksSettings(
            first=first,
            second=second,
            max_score_drop=settings.max_score_drop,
            report=path,
            watch=settings.watch,
        )
        _carried_out(parity_tasks, asked)

    yield Step(
        name="parity tasks",
        what="the scores of both servers",
        output=PARITY[2],
        inputs=lambda: {
            **{name: hash_of(given.folder / name) for name in _TASKS},
            **given.options("max_score_drop"),
        },
        run=run,
        found=partial(found.compared, "parity tasks"),
    )


def _run_tasks(given: Given, name: str, output: str, url: str) -> Step:
    settings = given.settings

    def run(path: Path) -> None:
        assert settings.engine is not None  # see `AcceptSettings.check`
        asked = RunTasksSettings(
            server=url,
            engine=settings.engine,
            tasks=settings.tasks,
            out=path,
            tokenizer=given.target,
            watch=settings.watch,
        )
        _carried_out(parity_run_tasks, asked)

    return Step(
        name=name,
        what=f"{', '.join(settings.tasks)} by {url}",
        output=output,
        inputs=lambda: {
            **given.drafts(),
            "--target": given.target_sha256,
            **given.options("engine", "tasks"),
        },
        run=run,
        found=partial(found.answered, name),
    )
