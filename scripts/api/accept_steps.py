"""The steps of an acceptance: each calls one verb, writes one output, and reads what it says.

The order is that of what a step costs, and of what the next ones need.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quantize.engines.contract import EngineCheck
from ...quantize.engines.preview import verdicts_of
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.gpus import architecture
from ...quantize.stored.declarations import HF_QUANT_CONFIG
from . import accept_found as found
from .accept_inputs import BF16, PLAIN, QUANTIZED, TRACES, Given, hash_of
from .accept_parity import parity_draft_step, parity_tasks_steps, parity_texts_step
from .accept_settings import AcceptSettings
from .accept_step import Step, carried_out
from .engine_verdicts import to_mapping
from .gate import GateSettings, gate
from .measure import MeasureSettings, measure
from .record import record
from .record_settings import RecordSettings
from .references import folder_of
from .verify import VerifySettings, verify

if TYPE_CHECKING:
    from ...quantize.pairing import PairCheck
    from ...validate.acceptance.journal import Inputs

GATE = "gate.json"


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
        yield parity_draft_step(given, given.traces)
    if settings.plain_server:
        yield parity_texts_step(given)
    if settings.tasks:
        yield from parity_tasks_steps(given)


def _check(given: Given) -> Step:
    from ...quantize.files.package_version import package_version
    from ...validate.acceptance.step_file import read_step, write_step

    settings = given.settings

    def run(path: Path) -> None:
        answers, pair = _answers(given), _pair(given)
        report = {"engines": to_mapping(answers), "pair": pair.to_mapping()}
        write_step(path, found.checked(answers, pair, path.name), report)

    return Step(
        name="check",
        what="what engines do with the quantized draft beside its target",
        output="check.json",
        inputs=lambda: {
            "QUANT": given.quantized_sha256,
            "--target": given.target_sha256,
            **given.options("engine", "arch", "target_args"),
            "--tp": settings.split,
            # What engines do is known by the tables of a version.
            "draftquant": package_version("draftquant"),
        },
        run=run,
        found=read_step,
        ends=True,
    )


def _answers(given: Given) -> tuple[EngineCheck, ...]:
    """Of the newest version of each engine, or of the one that is asked for, on each GPU."""
    settings = given.settings
    folder = folder_of(settings.quantized)
    answers = verdicts_of(
        Checkpoint.open(folder),
        arch=_arch(settings),
        tp=settings.split,
        has_side_file=(folder / HF_QUANT_CONFIG).is_file(),
    )
    return tuple(one for one in answers if settings.engine in (None, one.engine))


def _pair(given: Given) -> "PairCheck":
    """What the same engines make of the draft and its target."""
    from ...quantize.pairing import check_pair

    settings = given.settings
    folder = folder_of(settings.quantized)
    return check_pair(
        folder,
        given.target,
        engine=settings.engine,
        arch=_arch(settings),
        tp=settings.tp,
        target_args=settings.target_args,
        asked=settings.arch,
    )


def _arch(settings: AcceptSettings) -> str | None:
    return None if settings.arch is None else architecture(settings.arch)


def _verify(given: Given) -> Step:
    from ...validate.acceptance.step_file import read_step, write_step

    settings = given.settings

    def run(path: Path) -> None:
        asked = VerifySettings(
            output=settings.quantized,
            against=settings.draft,
            foreign=settings.foreign,
            target=given.target,
            listener=settings.listener,
        )
        report = carried_out(verify, asked)
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
            listener=settings.listener,
        )
        carried_out(record, asked)

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
        hash_of=found.traces_sha256,
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
            listener=settings.listener,
            **own,
        )
        carried_out(measure, asked)

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
                "traces": given.traces,
                "target": given.target,
                "num_draft_tokens": settings.num_draft_tokens,
                "device": settings.device,
                "dtype": settings.dtype,
            }
        asked = GateSettings(
            # Whoever was measured, or looked at by parity: it has to be these two.
            baseline=settings.draft,
            candidate=settings.quantized,
            **on_traces,
            measured=given.measured,
            parity=settings.parity,
            policy=settings.policy,
            max_relative_drop=settings.max_relative_drop,
            unrecorded=settings.foreign,
            report=path,
            listener=settings.listener,
        )
        carried_out(gate, asked)

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
