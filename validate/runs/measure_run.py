"""`measure`, whole: plans what a server is asked, measures it, and writes golden acceptance."""

import os
from pathlib import Path

from ...calibration.prompts.prompt_file import PromptEncoder
from ...calibration.prompts.prompt_source import chosen_prompts
from ...calibration.recording.decoding import Decoding
from ...calibration.server_client import KEY_VARIABLE, Patience
from ...quantize.files.staging import check_output
from ...recipes.listener import Bar, Listener, beyond_kept
from ...recipes.regular_file import optional_path
from ..golden.golden_sources import golden_of_measurement
from ..measure.measurement import Measurement
from ..measure.measurement_file import read_measurement
from ..measure.measuring import Plan, Progress, ServerAddress, measure
from ..measure.server_answers import Ask, get_protocol
from .judging_asked import MeasureRun
from .report_pages import check_golden, draft_identity, write_golden


def measured(asked: MeasureRun) -> Measurement:
    """Measure a server, or read an earlier measurement."""
    check_golden(asked.golden, overwrite=asked.overwrite)
    found = _one_server(asked) if asked.show is None else read_measurement(Path(asked.show))
    if asked.golden is not None:
        golden = golden_of_measurement(found)
        write_golden(asked.golden, golden, overwrite=asked.overwrite)
    return found


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
        teller = _Teller(bar, asked.listener, asked.concurrency)
        return measure(Path(out), server, get_protocol(engine), plan, on_progress=teller)


def _plan(asked: MeasureRun) -> Plan:
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
    return Plan(
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


class _Teller:
    """Moves the bar, and says once what a user has to know."""

    def __init__(self, bar: Bar, listener: Listener, concurrency: int) -> None:
        self._bar, self._listener = bar, listener
        self._show, self._concurrency = beyond_kept(bar), concurrency
        self._has_begun = False

    def __call__(self, progress: Progress) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._say(progress)
        if progress.counts is not None and progress.counts.num_steps:
            self._bar.label(f"measure {progress.counts.mean_acceptance_length:.3f}")
        self._show(progress.num_done, progress.num_prompts)

    def _say(self, progress: Progress) -> None:
        setup = progress.setup
        if progress.num_done:
            cut = ", whose last line was cut off and is asked for again"
            self._listener.note(
                f"goes on with {progress.num_done} of {progress.num_prompts} requests that are kept"
                + (cut if progress.dropped_line else "")
            )
        if setup.asked.concurrency < self._concurrency:
            self._listener.note(
                f"{setup.asked.concurrency} request(s) in flight, not {self._concurrency}: only the"
                " server's counters tell what is accepted"
            )
