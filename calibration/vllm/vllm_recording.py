"""Recording from vLLM: the same trace folder as from transformers, of any target on any GPUs.

An engine answers prompts and writes hidden states; finished work is kept, so that a second call of
the same command resumes; at the end it becomes a trace folder.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...quantize.drafts.config_reader import ConfigReader, with_text_config
from ...quantize.drafts.maths import linear
from ...quantize.files.checkpoint import CONFIG_FILE
from ...recipes.errors import TraceError
from ...recipes.listener import Progress, unseen
from ..passes.draft_inputs import fused_features
from ..recording.decoding import Decoding, continued, processed_logprobs
from ..recording.target_shape import RecordingPlan, target_identity
from ..traces.head_agreement import MAX_ROWS
from ..traces.prompt_trace import PromptTrace
from ..traces.target_tables import FINAL_NORM, HEAD, TargetTables
from ..traces.trace_folder import TraceFolder
from .kept_recording import EngineSetup, KeptRecording, check_last_norm, kept_recording, plan_json
from .states_file import read_features
from .vllm_engines import (
    LEAST_LOGPROB,
    Continuation,
    Engine,
    answers,
    offline_engine,
    server_engine,
)

# An engine returns its layers' output, before that norm. The norm divides by the root mean square
# in every target for these drafts, and multiplies by its weight, or by 1 + weight (Gemma,
# Qwen3-Next). Which of the two, and whether there is anything else, is shown by how likely the
# target was to say what it said.

MAX_GAP = 0.05  # nats, median; two engines in BF16 differ by 0.005 (experiments/served/RECORDED.md)
_FIX = "record with transformers: draftquant record --draft DRAFT --fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastNorm:
    """The norm, as served: states are multiplied by `scale` [W] after the division."""

    scale: Tensor
    eps: float

    def __call__(self, states: Tensor) -> Tensor:
        """The states [n, W] after the norm, in their own dtype."""
        x = states.float()
        root = (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return (x * root * self.scale).to(states.dtype)


class Written(NamedTuple):
    """What a target wrote [n], its log-probability [n], and the states before the norm [n, W]."""

    states: Tensor
    token_ids: Tensor
    logprob: Tensor


def shown_norm(target: Path, written: Iterable[Written], decoding: Decoding) -> LastNorm:
    """The norm under which the target's head gives its tokens their recorded probabilities."""
    tables = TargetTables.find(target)
    keys = ConfigReader(with_text_config(tables.checkpoint.config), target / CONFIG_FILE)
    eps, shared = keys.number("rms_norm_eps"), tables.shared(None)
    if FINAL_NORM not in shared:
        raise TraceError(target, "the target has no norm.weight beside its embedding", fix=_FIX)
    weight, head = shared[FINAL_NORM].float(), shared[HEAD]
    first = _first_rows(written)

    def gap(norm: LastNorm) -> float:
        """Nats between the probabilities under this norm and the recorded ones."""
        logprobs = processed_logprobs(linear(norm(first.states).float(), head), decoding)
        computed = logprobs.gather(1, first.token_ids[:, None])[:, 0]
        return float((computed - first.logprob).abs().median())

    norm = min((LastNorm(scale=scale, eps=eps) for scale in (weight, 1 + weight)), key=gap)
    if not gap(norm) <= MAX_GAP:
        raise TraceError(
            target,
            f"computed from the recorded states, the target's tokens are {gap(norm):.2f} nats more"
            " or less likely than the engine reported: something else than a norm stands between"
            " its layers and its head",
            fix=_FIX,
        )
    return norm


def _first_rows(written: Iterable[Written]) -> Written:
    texts: list[Written] = []
    for text in written:
        texts.append(text)
        if sum(len(text.token_ids) for text in texts) >= MAX_ROWS:
            break
    return Written(*(torch.cat(parts)[:MAX_ROWS] for parts in zip(*texts, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """An engine that we start, on this machine's devices or a cluster's."""

    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Running servers, and the folder that they write into, as this machine sees it."""

    urls: Sequence[str]
    folder: Path
    on_warning: Callable[[str], None] = lambda _text: None


def _opened(
    source: Offline | Served, plan: RecordingPlan, shared: Path, session: str
) -> AbstractContextManager[Engine]:
    if isinstance(source, Served):
        return server_engine(source.urls, plan, session, source.on_warning)
    return offline_engine(EngineSetup(plan, shared, source.arguments).arguments(), plan, session)


def record_with_vllm(
    plan: RecordingPlan, source: Offline | Served, out: Path, *, on_progress: Progress = unseen
) -> TraceFolder:
    """Let vLLM continue every prompt, and write the trace folder `out`.

    What is recorded is kept in `out` + ".recording" until the folder is complete: a second call
    with the same plan resumes after an interruption. While the folder is written both are
    on the disk.
    """
    check_last_norm(plan)
    plan.check(out)
    if isinstance(source, Offline):  # refused before the weights are read
        EngineSetup(plan, out, source.arguments).arguments()
    identity = target_identity(plan.target, plan.shape)
    asked = plan_json(plan, identity)
    with kept_recording(out, asked) as folder:
        kept = KeptRecording(folder, plan)
        session = hashlib.sha256(f"{out.absolute()}\0{asked}".encode()).hexdigest()[:16]
        _answer(plan, source, kept, session, on_progress)
        engines = {kept.answer(i)[1] for i in range(len(plan.prompts))}
        if len(engines) > 1:
            raise TraceError(folder, f"was recorded by {' and '.join(sorted(engines))}",
                             fix=f"record with one of them: rm -r {folder}")  # fmt: skip
        with plan.output(out, identity, plan.features, engines.pop()) as writer:
            read = _reading(plan, kept)
            for i in range(len(plan.prompts)):
                writer.add(_trace(plan, i, kept.answer(i)[0], kept.states(i), read), position=i)
        shutil.rmtree(folder, ignore_errors=True)
    return TraceFolder.open(out)


def _answer(
    plan: RecordingPlan,
    source: Offline | Served,
    kept: KeptRecording,
    session: str,
    on_progress: Progress,
) -> None:
    """Let the engine answer what is missing; it does not start where nothing is."""
    missing = kept.missing()
    count, done = len(plan.prompts), len(plan.prompts) - len(missing)
    on_progress(done, count)
    if not missing:
        return
    shared = source.folder if isinstance(source, Served) else kept.states_folder
    if isinstance(source, Served) and not shared.is_dir():
        raise TraceError("--shared", f"{shared} is no folder",
                         fix="give the folder that the server writes into")  # fmt: skip
    with _without_leftovers(shared, session), _opened(source, plan, shared, session) as engine:
        for position, answer in answers(
            engine,
            [(i, plan.prompts[i]) for i in missing],
            most_in_flight=plan.batch_size,
            bytes_per_token=kept.expected.bytes_per_token,
            max_new_tokens=plan.max_new_tokens,
        ):
            kept.take(position, answer, shared)
            done += 1
            on_progress(done, count)


@contextmanager
def _without_leftovers(shared: Path, session: str) -> Iterator[None]:
    """Remove files that a dead recorder, or this one at its end, requested and never fetched."""

    def remove() -> None:
        for path in shared.glob(f"{session}-*"):
            path.unlink(missing_ok=True)

    remove()
    try:
        yield
    finally:
        remove()


def _reading(plan: RecordingPlan, kept: KeptRecording) -> Callable[[Tensor], Tensor]:
    """What the draft reads of the engine's output: all of it, or the output of its fc."""
    draft = plan.fuse_with
    if draft is None:
        return lambda states: states
    if not plan.reads_last_state:
        return partial(fused_features, draft)

    def written() -> Iterator[Written]:
        for i, prompt in enumerate(plan.prompts):
            answer = kept.answer(i)[0]
            yield Written(
                states=read_features(kept.states(i))[len(prompt.token_ids) - 1 :],
                token_ids=torch.tensor(answer.token_ids),
                logprob=torch.tensor(answer.token_logprob),
            )

    norm = shown_norm(plan.target, written(), plan.decoding)
    return lambda states: fused_features(draft, norm(states))


def _trace(
    plan: RecordingPlan,
    position: int,
    answer: Continuation,
    states: Path,
    read: Callable[[Tensor], Tensor],
) -> PromptTrace:
    prompt, spec = plan.prompts[position], plan.decoding.logprob_spec
    token_ids = torch.tensor(answer.token_ids)
    ids, logprobs = None, None
    if spec and spec.num_top:
        pairs = torch.tensor(answer.top, dtype=torch.float64)
        ids, values = pairs[:, :, 0].long(), pairs[:, :, 1].float()
        # A token of the least possible log-probability is impossible.
        logprobs = values.masked_fill(values <= LEAST_LOGPROB, -torch.inf)
    # For the prompt, engines do not say what the target would have written.
    top1 = torch.full((len(prompt.token_ids) + len(token_ids) - 1,), -1)
    if not plan.decoding.sampled:
        top1[len(prompt.token_ids) - 1 :] = token_ids
    elif ids is not None:
        top1[len(prompt.token_ids) - 1 :] = ids[:, 0]
    return continued(
        prompt,
        token_ids,
        features=read(read_features(states)),
        target_top1=top1,
        token_logprob=torch.tensor(answer.token_logprob) if spec else None,
        top_token_ids=ids,
        top_logprobs=logprobs,
    )
