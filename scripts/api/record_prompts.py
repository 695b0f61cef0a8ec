"""The prompts that `record` gives its target: of a file, of a data set, or texts that go on."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.checkpoint import CONFIG_FILE
from .record_settings import RecordSettings

if TYPE_CHECKING:
    from ...calibration.prompts.prompt_file import Prompt
    from ...calibration.prompts.prompt_source import ReadPrompts
    from ...calibration.recording.prompt_fit import FittedPrompts
    from ...calibration.recording.target_shape import TargetShape


def prompts_to_record(settings: RecordSettings) -> "FittedPrompts":
    """The prompts that are recorded, and a word on those that are too long."""
    from ...calibration.recording.prompt_fit import fitted_prompts

    found, shape = _read(settings), shape_of(settings)
    read = found.prompts
    fitted = fitted_prompts(
        read, shape, settings.max_new_tokens, settings.too_long, settings.prompts
    )
    if long := fitted.too_long:
        done = "left out" if long.skipped else "cut to their last tokens"
        names = long.skipped or long.truncated
        verb = "is" if len(names) == 1 else "are"
        settings.listener.warning(
            f"{settings.prompts}: {len(names)} of {len(read)} prompts {verb} {done}: with"
            f" {settings.max_new_tokens} new tokens they exceed the target's {shape.max_positions}"
            f" positions ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
        )
        if long.truncated and settings.continued and any(one.conversation_sha256 for one in read):
            settings.listener.warning(
                f"{settings.prompts}: a text that is cut no longer begins as its conversation did:"
                " gate judges it only in one folder with the traces that began it (traces merge)"
            )
    return dataclasses.replace(fitted, dataset=found.dataset)


def _read(settings: RecordSettings) -> "ReadPrompts":
    from ...calibration.prompts.prompt_file import PromptEncoder
    from ...calibration.prompts.prompt_source import ReadPrompts
    from ...calibration.traces.manifest import MANIFEST_FILE

    encoder = PromptEncoder(Path(settings.target), continues=settings.continued)
    if settings.continued and (Path(settings.prompts) / MANIFEST_FILE).is_file():
        return ReadPrompts(prompts=_recorded_texts(settings))
    read = settings.read_prompts(settings.prompts, encoder)
    longer = sum(bool(prompt.later_turns) for prompt in read.prompts)
    if longer and settings.turns == "first":
        settings.listener.note(
            f"{settings.prompts}: {longer} of {len(read.prompts)} prompts have later turns of the"
            " user, which follow the target's answer: the first turn is recorded (--turns all:"
            " each)"
        )
    return read


def _recorded_texts(settings: RecordSettings) -> "tuple[Prompt, ...]":
    """Texts of a trace folder, and a word on those that have ended or are another target's."""
    from ...calibration.prompts.recorded_texts import recorded_texts
    from ...calibration.recording.target_shape import end_token_ids
    from ...calibration.traces.trace_folder import TraceFolder, file_sha256

    target, traces = Path(settings.target), TraceFolder.open(Path(settings.prompts))
    ends = frozenset[int]() if settings.ignore_eos else end_token_ids(target)
    found = recorded_texts(traces, shape_of(settings).vocab_size, ends, settings.choice)
    if found.ended:
        named = ", ".join(found.ended[:3]) + (", ..." if found.ended[3:] else "")
        settings.listener.warning(
            f"{settings.prompts}: {len(found.ended)} of {len(traces)} texts end with the target's"
            f" end of text, and are left out ({named})"
        )
    recorded = traces.manifest.target
    if recorded.config_sha256 not in (None, file_sha256(target / CONFIG_FILE)):
        settings.listener.warning(
            f"{settings.prompts}: the texts are of the target {recorded.name}, whose {CONFIG_FILE}"
            f" is another than that of {target.name}: they are given, and not its own"
        )
    return found.prompts


def shape_of(settings: RecordSettings) -> "TargetShape":
    """Sizes of the target before its weights are read; an engine may know more kinds of them."""
    from ...calibration.recording.target_model import configured_shape
    from ...calibration.recording.target_shape import TargetShape

    read = TargetShape.read if settings.engine == "vllm" else configured_shape
    return read(Path(settings.target))
