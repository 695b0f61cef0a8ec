"""`measure`, whole: plans the requests to a server, measures it, and writes golden acceptance."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ...calibration.prompts.prompt_file import PromptEncoder
from ...calibration.prompts.prompt_source import chosen_prompts
from ...calibration.recording.decoding import Decoding
from ...calibration.server_client import KEY_VARIABLE, Patience
from ...quantize.files.report_files import write_reports
from ...quantize.files.staging import check_output
from ...recipes.listener import Bar, beyond_kept
from ...recipes.regular_file import optional_path
from ..golden.golden_acceptance import golden_document
from ..golden.golden_sources import golden_of_measurement
from ..measure.measurement import Measurement
from ..measure.measurement_file import read_measurement
from ..measure.measuring import MeasurePlan, Progress, ServerAddress, measure
from ..measure.server_answers import Ask, get_protocol
from .report_pages import draft_identity
from .serving_asked import MeasureRun


def measured(asked: MeasureRun) -> Measurement:
    """Measure a server, or read an earlier measurement."""
    measurement = _one_server(asked) if asked.show is None else read_measurement(Path(asked.show))
    if asked.golden is not None:
        golden = golden_document(golden_of_measurement(measurement))
        write_reports({Path(asked.golden): golden}, overwrite=asked.overwrite)
    return measurement


def _one_server(asked: MeasureRun) -> Measurement:
    out, engine, url = asked.out, asked.engine, asked.server
    assert out is not None  # see `check`, and for the others too
    assert engine is not None
    assert url is not None
    check_output(Path(out))
    server = ServerAddress(
        url=url,
        key=os.environ.get(KEY_VARIABLE) or None,
        patience=Patience(attempts=asked.attempts, seconds=asked.timeout),
        most_per_second=asked.max_requests_per_second,
    )
    plan = _plan(asked)
    with asked.listener.bar("measure", len(plan.prompts)) as bar:
        teller = _teller(asked, bar)
        return measure(Path(out), server, get_protocol(engine), plan, on_progress=teller)


def _plan(asked: MeasureRun) -> MeasurePlan:
    decoding = Decoding(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        num_top_logprobs=asked.top_logprobs,
    )
    encoder, path = PromptEncoder(optional_path(asked.tokenizer)), asked.prompts
    assert path is not None  # see `check`
    prompts = chosen_prompts(path, encoder, asked).prompts
    if longer := sum(bool(prompt.later_turns) for prompt in prompts):
        asked.listener.note(
            f"{path}: {longer} of {len(prompts)} prompts have later turns of the user,"
            " which follow the target's answer: the first turn is measured"
        )
    return MeasurePlan(
        prompts=prompts,
        ask=Ask(
            decoding=decoding, max_new_tokens=asked.max_new_tokens, ignore_eos=asked.ignore_eos
        ),
        concurrency=asked.concurrency,
        num_warm_up=asked.warm_up,
        template_sha256=encoder.template_sha256,
        draft=draft_identity(asked.draft, asked.served_as) if asked.draft else None,
        model=asked.model,
    )


def _teller(asked: MeasureRun, bar: Bar) -> Callable[[Progress], None]:
    show, has_begun = beyond_kept(bar), False

    def tell(progress: Progress) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            for note in _notes(progress, asked.concurrency):
                asked.listener.note(note)
        if progress.counts is not None and progress.counts.num_steps:
            bar.label(f"measure {progress.counts.mean_acceptance_length:.3f}")
        show(progress.num_done, progress.num_prompts)

    return tell


def _notes(progress: Progress, concurrency: int) -> Iterator[str]:
    if progress.num_done:
        cut = ", whose last line was cut off and is asked for again"
        kept = f"goes on with {progress.num_done} of {progress.num_prompts} requests that are kept"
        yield kept + (cut if progress.dropped_line else "")
    if (sent := progress.setup.asked.concurrency) < concurrency:
        yield (
            f"{sent} request(s) in flight, not {concurrency}: only the server's counters tell what"
            " is accepted"
        )
