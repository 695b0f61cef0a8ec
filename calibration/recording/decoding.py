"""How a target's text is continued, greedily or drawn, and what is recorded until it ends.

Temperature, then top-k, then top-p, as transformers, vLLM and SGLang apply them. What is recorded
stays on the device, and leaves when its rows have ended; features of long texts do not stay: they
go to one file per row as the target returns them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...quantize.files.mapped_rows import SpooledRows
from ...recipes.errors import TraceError
from ..prompts.prompt_file import Prompt
from ..traces.manifest import FeatureSpec, LogprobSpec, Sampling, TargetIdentity, TraceManifest
from ..traces.prompt_trace import PromptTrace, prompt_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Settings of a recorder."""

    temperature: float = 0  # 0 = greedy
    top_p: float = 1.0  # in (0, 1], 1 = all tokens
    top_k: int = 0  # 0 = all tokens
    seed: int = 0  # a prompt's draws depend only on it and on the prompt's tokens
    logprobs: bool = False  # keep those of emitted tokens; for sampled ones they are always kept
    num_top_logprobs: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not self.sampled and (self.top_p, self.top_k) != (1, 0):
            raise TraceError(
                "--temperature",
                "--top-p and --top-k have no effect, because decoding is greedy",
                fix="give a --temperature above 0, or leave both out",
            )

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    def manifest(self, target: TargetIdentity, features: FeatureSpec) -> TraceManifest:
        """What trace.json will say about texts continued like this, before any is."""
        drawn = Sampling(top_p=self.top_p, top_k=self.top_k, seed=self.seed)
        return TraceManifest(
            temperature=self.temperature,
            sampling=drawn if self.sampled else None,
            ignore_eos=self.ignore_eos,
            target=target,
            features=features,
            logprobs=self.logprob_spec,
        )

    @property
    def logprob_spec(self) -> LogprobSpec | None:
        """For trace.json: raw for greedy text; for drawn text, of the distribution drawn from."""
        if not (self.sampled or self.logprobs or self.num_top_logprobs):
            return None
        return LogprobSpec(
            kind="processed" if self.sampled else "raw", num_top=self.num_top_logprobs
        )


GREEDY = Decoding()


Chosen = dict[str, Tensor]
"""The next token of B sequences, by the names of `PromptTrace`, with what else was requested:
token_ids [B] int64, token_logprob [B] and top_logprobs [B, num_top] float32, top_token_ids [B,
num_top] int64, most likely first."""


def continued(prompt: Prompt, token_ids: Tensor, **recorded: Tensor | None) -> PromptTrace:
    """The trace of a prompt, the tokens [m] that the target wrote, and what was recorded."""
    return PromptTrace(
        id=prompt.id,
        category=prompt.category,
        prompt_length=len(prompt.token_ids),
        token_ids=torch.cat((torch.tensor(prompt.token_ids), token_ids)),
        cluster=prompt.cluster,
        conversation_sha256=prompt.conversation_sha256,
        **recorded,  # type: ignore[arg-type]
    )


def prompt_draws(decoding: Decoding, token_ids: Sequence[int], count: int) -> Tensor:
    """Numbers in [0, 1) that draw the tokens of a prompt, [count] float64 on the CPU.

    Each prompt has its own stream, so its continuation does not depend on its batch.
    """
    stream = torch.Generator().manual_seed(prompt_seed(decoding.seed, token_ids))
    return torch.rand(count, generator=stream, dtype=torch.float64)


def choose(decoding: Decoding, logits: Tensor, top1: Tensor, draws: Tensor | None) -> Chosen:
    """The next token of B sequences by their last logits [B, V], whose largest are at `top1` [B].

    `draws`: [B] float64 on the same device, one of `prompt_draws` each; None where greedy.
    """
    spec = decoding.logprob_spec
    if spec is None:
        return {"token_ids": top1}
    logprobs = processed_logprobs(logits, decoding)
    token_ids = top1 if draws is None else _drawn(logprobs, draws)
    chosen = {"token_ids": token_ids, "token_logprob": logprobs.gather(1, token_ids[:, None])[:, 0]}
    if not spec.num_top:
        return chosen
    top = logprobs.topk(spec.num_top)
    return chosen | {"top_token_ids": top.indices, "top_logprobs": top.values}


def _drawn(logprobs: Tensor, draws: Tensor) -> Tensor:
    """One token per row by inversion, [B]; float64, since a vocabulary has many small terms."""
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    drawn = draws[:, None] * total
    drawn = drawn.minimum(total.nextafter(torch.zeros_like(total)))
    # The first token whose cumulative probability lies above the number: never one of zero.
    return torch.searchsorted(cumulative, drawn, right=True)[:, 0]


def processed_logprobs(logits: Tensor, decoding: Decoding) -> Tensor:
    """[B, V] float32 log-probabilities of the distribution that tokens are drawn from.

    They are -infinity for tokens that top-k or top-p exclude; if several tokens are as likely as
    the last one that top-k keeps, all of them are kept.
    """
    wide = logits.float()
    if not decoding.sampled:
        return wide.log_softmax(-1)
    wide = wide / decoding.temperature
    if 0 < decoding.top_k < wide.shape[-1]:
        least = wide.topk(decoding.top_k).values[:, -1:]
        wide = wide.masked_fill(wide < least, -torch.inf)
    if decoding.top_p < 1:
        ordered, order = wide.sort(dim=-1)  # ascending: the tail that sums to 1 - p is dropped
        tail = ordered.double().softmax(-1).cumsum(-1) <= 1 - decoding.top_p
        tail[:, -1] = False
        wide = wide.masked_fill(tail.scatter(1, order, tail), -torch.inf)
    return wide.log_softmax(-1)


def prompt_seed(seed: int, token_ids: Sequence[int]) -> int:
    """The seed of a prompt's own draws, below 2**60."""
    return int(prompt_sha256((seed, *token_ids))[:15], 16)


LONG_TEXT = 4096  # tokens of prompt and answer beyond which features are written as they come

Fuse = Callable[[Tensor], Tensor]
"""What a draft's fc makes of the features [n, width] of one prompt."""


class KeptOutputs:
    """Buffers [R, longest, ...]: entry i of a row is what the target returned for its token i.

    Features leave as `fuse` returns them. Where `longest` exceeds `LONG_TEXT`, they are on the
    disk in the folder `spool` until then; without a spool they stay on the device.
    """

    def __init__(
        self,
        num_rows: int,
        longest: int,
        *,
        width: int,
        dtype: torch.dtype,
        stored: torch.dtype,
        spec: LogprobSpec | None,
        device: torch.device,
        fuse: Fuse | None,
        spool: Path | None,
    ) -> None:
        self._spool = spool if longest > LONG_TEXT else None
        self._spooled: dict[int, SpooledRows] = {}
        self._stored, self._fuse = stored, fuse
        ids, logprobs = torch.int64, torch.float32
        kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "features": (dtype, (0 if self._spool else width,)),
            "target_top1": (ids, ()),
            "token_ids": (ids, ()),
        }
        if spec:
            kinds["token_logprob"] = (logprobs, ())
        if spec and spec.num_top:
            kinds["top_token_ids"] = (ids, (spec.num_top,))
            kinds["top_logprobs"] = (logprobs, (spec.num_top,))
        self._kept = {
            name: torch.zeros((num_rows, longest, *shape), dtype=kind, device=device)
            for name, (kind, shape) in kinds.items()
        }

    def read(self, row: int, start: int, features: Tensor, top1: Tensor) -> None:
        """Keep what the target gave for tokens of a prompt: [t, width] and [t], from `start`."""
        entries = slice(start, start + len(top1))
        self._kept["target_top1"][row, entries] = top1
        if not self._spool:
            self._kept["features"][row, entries] = features
            return
        if start == 0:
            self._spooled.pop(row, None)
        self._write(row, start, features)

    def run(self, rows: Tensor, at: Tensor, features: Tensor, top1: Tensor) -> None:
        """Keep what the target gave for one token each: [B, width] and [B], at these entries."""
        self._kept["target_top1"][rows, at] = top1
        if not self._spool:
            self._kept["features"][rows, at] = features
            return
        for i, (row, entry) in enumerate(zip(rows.tolist(), at.tolist(), strict=True)):
            self._write(row, entry, features[i : i + 1])

    def chose(self, rows: Tensor, at: Tensor, chosen: Chosen) -> None:
        """Keep the tokens that were chosen after these entries."""
        for name, values in chosen.items():
            self._kept[name][rows, at] = values

    def continuations(self, rows: Sequence[int]) -> Tensor:
        """[B, longest]: the tokens that were chosen, on the CPU; valid only after a prompt."""
        return self._kept["token_ids"][torch.tensor(rows)].cpu()

    def leave(self, rows: Sequence[int], entries: Sequence[slice]) -> list[dict[str, Tensor]]:
        """Copy rows to the CPU, each kind in one go, by the names of `PromptTrace`.

        Features and top-1 are of all tokens, the others of the continuation. On a GPU they are
        complete only when its stream has reached this point.
        """
        whole = [slice(0, some.stop) for some in entries]
        left = {
            name: self._split(name, rows, whole if name in _OF_ALL else entries)
            for name in self._kept
        }
        if self._spool:
            left["features"] = [
                self._spooled.pop(row).rows(some.stop)
                for row, some in zip(rows, entries, strict=True)
            ]
        return [dict(zip(left, row, strict=True)) for row in zip(*left.values(), strict=True)]

    def _write(self, row: int, start: int, features: Tensor) -> None:
        """Features [n, width] of a row, from entry `start` on."""
        assert self._spool is not None  # otherwise they stay
        fused = self._fuse(features) if self._fuse else features
        if row not in self._spooled:
            self._spooled[row] = SpooledRows(self._spool, fused.shape[1], self._stored)
        self._spooled[row].write(start, fused)

    def _split(self, name: str, rows: Sequence[int], entries: Sequence[slice]) -> list[Tensor]:
        buffer = self._kept[name]
        parts = [buffer[row, some] for row, some in zip(rows, entries, strict=True)]
        if name == "features" and not self._spool:
            fused = [self._fuse(part) for part in parts] if self._fuse else parts
            packed = torch.cat(fused).to(self._stored)
        else:
            packed = torch.cat(parts)
        return list(torch.split(_to_cpu(packed), [len(part) for part in parts]))


_OF_ALL = ("features", "target_top1")


def _to_cpu(tensor: Tensor) -> Tensor:
    """A copy that the device makes asynchronously; on a CPU `torch.cat` has already made one."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
