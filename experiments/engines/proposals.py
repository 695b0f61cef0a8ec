"""Which tokens a loaded draft proposes in an engine: its head, as the engine's own code shares it.

Knows torch and nothing of any engine until it is called. A head of fewer rows than the target's may
load without a word and still not reach the proposals: the target's is served in its place, or the
table of target ids is not read. So the same states are multiplied by the head that the engine has
after sharing, by its own code, and the target ids are compared with those of the stored head.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

NUM_STATES = 31
UNCLEAR = -1
"""Of a kept proposal: the two best logits are less than 0.25 apart, which BF16 may turn."""
DEFAULT_LAYERS = [2, 4, 5]
"""Of a target of 8 layers, as both engines say."""


def states(hidden: int) -> Tensor:
    """[NUM_STATES, hidden] BF16; any numbers that BF16 holds do."""
    rows, columns = torch.arange(NUM_STATES)[:, None], torch.arange(hidden)
    return (((7 * rows * (columns + 3) + 5 * columns) % 31 - 15) / 8).bfloat16()


def target_table(vocab: int, hidden: int) -> Tensor:
    """[vocab, hidden] BF16: the target's embedding and head, which no draft stores."""
    rows, columns = torch.arange(vocab)[:, None], torch.arange(hidden)
    return (((11 * rows * (columns + 1) + 3 * columns + rows) % 37 - 18) / 64).bfloat16()


def differ(expected: Sequence[int], found: Sequence[int]) -> bool:
    """Whether a clear one of the expected proposals is another one."""
    return any(token not in (UNCLEAR, other) for token, other in zip(expected, found, strict=True))


def judged(
    outcome: Mapping[str, Any], reads: Sequence[int] | None, proposes: Sequence[int] = ()
) -> dict[str, Any]:
    """A loader's outcome with what is known of a draft that loads beside its parameters.

    It is wrong where the default runner captures other layers of the target than the draft reads,
    and where it proposes other tokens than its head says.
    """
    found = outcome["proposes"]
    outcome = {key: value for key, value in outcome.items() if key != "proposes"}
    if outcome["verdict"] != "LOADS":
        return outcome
    if outcome["captures"] and reads is not None:
        captured = next(iter(outcome["captures"].values())) or DEFAULT_LAYERS
        if sorted(set(captured)) != list(reads):
            outcome |= {"verdict": "LOADS BUT WRONG", "captured": captured}
    if isinstance(found, str):
        outcome |= {"verdict": "LOADS BUT WRONG", "proposals": found}
    elif proposes and found and differ(proposes, found):
        outcome |= {"verdict": "LOADS BUT WRONG", "proposals": "others than those of its head"}
    return outcome


def vllm_proposals(model: nn.Module, config: Any) -> list[int]:
    """By the loader of the V2 model runner, which shares the target's tables.

    Args:
        model: loaded. config: vLLM's, of the target with the draft.
    """
    from vllm.model_executor import model_loader
    from vllm.model_executor.layers import vocab_parallel_embedding as layers
    from vllm.v1.worker.gpu.spec_decode.dflash import utils as dflash
    from vllm.v1.worker.gpu.spec_decode.dspark import utils as dspark
    from vllm.v1.worker.gpu.spec_decode.eagle import utils as eagle

    vocab, hidden = config.model_config.get_vocab_size(), config.model_config.get_hidden_size()
    target = _Target(
        layers.VocabParallelEmbedding(vocab, hidden, params_dtype=torch.bfloat16),
        layers.ParallelLMHead(vocab, hidden, params_dtype=torch.bfloat16),
    )
    load: Callable[..., nn.Module] = {
        "dflash": dflash.load_dflash_model,
        "dspark": dspark.load_dspark_model,
    }.get(config.speculative_config.method, eagle.load_eagle_model)

    def loaded(**_named: object) -> nn.Module:
        return model

    def same(value: Any, **_changes: object) -> Any:
        return value  # attention and cache of the draft, which no head asks for

    with (
        patch.object(model_loader, "get_model", loaded),
        patch.object(dflash, "get_model", loaded),
        patch.object(eagle, "get_model", loaded),
        patch.object(dflash, "replace", same),
        patch.object(dspark, "replace", same),
    ):
        shared: Any = load(target, config)
    rows = states(hidden)
    with torch.no_grad():
        if config.speculative_config.method == "dspark":  # `dspark/speculator.py`, greedily
            best = shared.compute_draft_logits(rows).argmax(-1)
            return _listed(shared.map_draft_to_target(best))
        if hasattr(shared, "compute_candidates"):  # of DFlash2's selector, the likeliest first
            return _listed(shared.compute_candidates(rows)[0][:, 0])
        return _listed(shared.compute_logits(rows).argmax(-1))


def sglang_proposals(model: nn.Module, algorithm: str) -> list[int]:
    """By the draft worker of SGLang, which shares the target's tables.

    Args:
        model: loaded. algorithm: as `--speculative-algorithm` names it.
    """
    from sglang.srt.layers import vocab_parallel_embedding as layers
    from sglang.srt.speculative import eagle_worker_v2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    vocab, hidden = model.config.vocab_size, model.config.hidden_size
    dtype = next(model.parameters()).dtype
    target = _Target(
        layers.VocabParallelEmbedding(vocab, hidden, params_dtype=dtype),
        layers.ParallelLMHead(vocab, hidden, params_dtype=dtype),
    )
    runner = SimpleNamespace(
        model=target, model_config=SimpleNamespace(model_path="", revision=None), load_config=None
    )
    worker: Any = object.__new__(eagle_worker_v2.EagleDraftWorker)
    worker.speculative_algorithm = SpeculativeAlgorithm.from_string(algorithm)
    worker.draft_runner = SimpleNamespace(model=model)
    worker.target_worker = SimpleNamespace(model_runner=runner)
    given = SimpleNamespace(speculative_token_map=None)
    with patch.object(eagle_worker_v2, "get_spec", lambda: given), torch.no_grad():
        worker.init_token_map()
        worker.init_lm_head()
        logits = model.logits_processor._compute_lm_head(states(hidden).to(dtype), model.lm_head)
        best = logits[:, : model.logits_processor.vocab_size].argmax(-1)
        return _listed(best if worker.hot_token_id is None else worker.hot_token_id[best])


class _Target(nn.Module):
    """As much of a target as its draft shares."""

    def __init__(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.model, self.lm_head = nn.Module(), lm_head
        self.model.embed_tokens = embed_tokens
        for module in (embed_tokens, lm_head):
            rows, hidden = module.weight.shape  # of one shard, filled up
            module.weight.data.copy_(target_table(rows, hidden))

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """As SGLang asks for them."""
        embed_tokens: Any = self.model.embed_tokens
        head: Any = self.lm_head
        return embed_tokens.weight, head.weight


def _listed(tokens: Tensor) -> list[int]:
    return [int(token) for token in tokens.tolist()]
