"""A dump becomes a trace folder: settled by a few of its texts, then text by text."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers.utils import logging
from typing_extensions import override

from ...quantize.files.hub import Reference, folder_of
from ...quantize.files.staging import check_output
from ...quantize.stored.loading import LoadedDraft, load_draft
from ...recipes.brief import Brief, apart
from ...recipes.errors import CheckpointError, TraceError
from ..passes.draft_inputs import mask_token_ids
from ..prompts.prompt_file import read_prompts
from ..traces.feature_evidence import FeatureTally
from ..traces.head_agreement import MIN_AGREEMENT
from ..traces.manifest import FeatureSpec, TraceManifest
from ..traces.prompt_trace import PromptTrace, prompt_sha256
from ..traces.target_tables import SharedTables, TargetTables
from ..traces.trace_folder import TraceFolder
from ..traces.writer import TraceWriter, trace_output
from . import DumpFormat, DumpImport
from .dump_answers import Answer, Answers, TargetHead
from .dump_evidence import TargetFacts, WholeTexts, read_target, recomputing
from .dump_layouts import Sample, samples_of
from .dump_settling import (
    DeclaredDump,
    DumpReading,
    Settling,
    check_finite,
    check_sample,
    feature_dtype,
    last_states,
    no_answer,
    split_last,
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ImportReport(Brief):
    """Traces that were made from a dump.

    Attributes:
        traces: the folder that was written, opened.
        layout: how the dump was read.
        num_samples: number of texts in the dump.
        num_without_answer: texts without a token to count.
        num_off_policy: texts that were left out because the target would have answered differently.
    """

    traces: TraceFolder
    layout: DumpReading
    num_samples: int
    num_without_answer: int
    num_off_policy: int

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "traces": self.traces.folder,
            "prompts": f"{len(self.traces)} of {self.num_samples} texts",
            "without an answer": self.num_without_answer or None,
            "left out as not the target's own": self.num_off_policy or None,
        }


def import_asked(asked: DumpImport) -> ImportReport:
    """Write the trace folder `out` of a dump of hidden states, a folder or one file of it.

    The target's head and last norm show whether answers are the target's own; where transformers
    can run the target here, it shows which layers the dump holds. Its config.json alone is enough
    with a draft, and `greedy`. Without `leave_out_off_policy` an answer that the target would not
    have given is an error.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one bar is enough
    dump, target, out = Path(asked.dump), Path(asked.target), Path(asked.out)
    check_output(out)
    draft = None if asked.draft is None else _loaded(asked.draft, target)
    masks = () if draft is None else mask_token_ids(draft.geometry)
    prompts = None if asked.prompts is None else read_prompts(Path(asked.prompts), target=target)
    layers = None if asked.aux_layer_ids is None else tuple(asked.aux_layer_ids)
    declared = DeclaredDump(layer_ids=layers, draft=draft, greedy=asked.greedy)
    facts = read_target(target)
    pendings = samples_of(dump, asked.written_by)
    with asked.listener.bar("import", len(pendings)) as bar:
        layout = Settling(dump, pendings, facts, declared, Answers(facts.ends, prompts)).layout()
        first, run = pendings[0].read(), layout.recomputed
        if doubt := layout.doubt():
            asked.listener.warning(f"{dump}: {doubt}")
        conversion = _Conversion(layout, facts, first, Answers(facts.ends, prompts))
        with (
            trace_output(
                out,
                conversion.head(asked.written_by),
                tables=TargetTables.find(target) if asked.tables else None,
                table_ids=(*asked.table_ids, *masks),
            ) as writer,
            recomputing(target, run, pendings, first) if run else nullcontext() as whole_texts,
        ):
            for done, pending in enumerate(pendings, start=1):
                conversion.convert(pending.read(), writer, whole_texts)
                bar.set(done, len(pendings))
            rows = whole_texts.counts() if whole_texts else None
            conversion.check(dump, leave_out_off_policy=asked.leave_out_off_policy)
    return ImportReport(
        traces=TraceFolder.open(out),
        layout=replace(layout, rows=rows),
        num_samples=len(pendings),
        num_without_answer=conversion.num_without_answer,
        num_off_policy=conversion.num_off_policy,
    )


def _loaded(draft: Reference, target: Path) -> LoadedDraft:
    try:
        shared = TargetTables.find(target).shared()
    except CheckpointError:  # a config alone; a draft with its own tables needs none
        shared = SharedTables({})
    return load_draft(folder_of(draft), shared=shared)


class _Conversion:
    """Texts, one after the other, become traces; all must look like `first`."""

    def __init__(
        self, layout: DumpReading, target: TargetFacts, first: Sample, answers: Answers
    ) -> None:
        self._layout, self._target, self._first, self._answers = layout, target, first, answers
        self._head = TargetHead(target.tables.shared()) if layout.head and target.tables else None
        self._evidence = FeatureTally()
        self._num_kept = self.num_without_answer = self.num_off_policy = 0
        self._lowest = 1.0

    def head(self, written_by: DumpFormat) -> TraceManifest:
        layer_ids, run = self._layout.layer_ids, self._layout.recomputed
        return TraceManifest(
            temperature=0,
            recorded_by=f"dump of {written_by}",
            target=run.target if run else self._target.identity,
            features=FeatureSpec(
                kind="aux",
                width=len(layer_ids) * self._target.width,
                dtype=feature_dtype(self._first),
                aux_layer_ids=layer_ids,
                fusion_sha256=None,
                storage=None if self._first.scales is None else "fp8-per-token",
            ),
        )

    def convert(self, sample: Sample, writer: TraceWriter, whole_texts: WholeTexts | None) -> None:
        """Write a trace of each answer that is the target's own."""
        width = self._target.width
        check_sample(sample, self._target, self._first)
        if self._layout.last_in_aux:
            sample = split_last(sample, width)
        answers = list(self._answers.of(sample))
        self.num_without_answer += not answers
        if answers:
            check_finite(sample, answers[-1].stop, width, self._layout.layer_ids)
            if whole_texts:
                whole_texts.add(sample, answers[-1].stop)
        for answer in answers:
            if not self._is_own(answer):
                self.num_off_policy += 1
                continue
            trace = self.trace(answer)
            self._evidence.add(trace)
            writer.add(trace, position=self._num_kept)
            self._num_kept += 1

    def trace(self, answer: Answer) -> PromptTrace:
        ids, behind = answer.sample.token_ids, -self._layout.shift
        token_ids = ids[: min(answer.stop, len(ids))]
        features = answer.sample.aux[behind : behind + len(token_ids) - 1]
        scales = answer.sample.scales
        if scales is not None:
            scales = scales[behind : behind + len(token_ids) - 1].clone()
        top1 = torch.full((len(token_ids) - 1,), -1, dtype=torch.int64)
        top1[answer.start - 1 :] = token_ids[answer.start :]
        conversation = prompt_sha256(ids[: answer.first_start].tolist())
        return PromptTrace(
            id=answer.id,
            category=answer.category,
            prompt_length=answer.start,
            token_ids=token_ids,
            features=features.clone(),
            feature_scales=scales,
            target_top1=top1,
            conversation_sha256=conversation if answer.start != answer.first_start else None,
        )

    def _is_own(self, answer: Answer) -> bool:
        finding, last = self._layout.head, last_states(self._layout, answer.sample, self._target)
        if self._head is None or finding is None or last is None:
            return True
        share = self._head.share(answer, last, finding.norm, finding.shift)
        self._lowest = min(self._lowest, share)
        return share >= MIN_AGREEMENT

    def check(self, dump: Path, *, leave_out_off_policy: bool) -> None:
        """Refuse a dump after all of its texts were read."""
        kept = self._num_kept
        if self.num_off_policy and (not leave_out_off_policy or not kept):
            total = kept + self.num_off_policy
            lowest = apart(self._lowest, MIN_AGREEMENT, ".0%")
            raise TraceError(
                dump,
                f"the target did not write {self.num_off_policy} of {total} answers greedily: its"
                f" head predicts as few as {lowest} of their tokens, expected {MIN_AGREEMENT:.0%}."
                f" Without them {kept} answers remain",
                fix="dump the target's own greedy answers, or leave these out:"
                " --leave-out-off-policy",
            )
        if not kept:
            raise no_answer(dump)
        if problem := self._evidence.evidence().fault():
            fix = "dump the tokens and the hidden states of the same texts"
            raise TraceError(dump, problem, fix=fix)
