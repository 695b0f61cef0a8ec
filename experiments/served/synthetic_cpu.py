"""vLLM plugin: synthetic acceptance on a CPU, whose kernels lack it.

vLLM's kernels for CPUs stop with "Synthetic acceptance not supported with CPU sampling"
(utils/cpu_triton_utils.py). This does what its kernels for GPUs do
(v1/sample/rejection_sampler.py, SYNTHETIC_MODE) with the rates and the draws that the engine hands
over; settings, rates, draws, scheduler and counters are the engine's.
"""

from typing import Any


def register() -> None:
    """Put it in the place of the two kernels; vLLM calls this before it takes them."""
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._rejection_greedy_sample_kernel_impl = greedy
    cpu_triton_utils._rejection_random_sample_kernel_impl = random


def greedy(
    output: Any, ends: Any, drafted: Any, otherwise: Any, bonus: Any, is_greedy: Any,
    _most: int, uniform: Any, rates: Any, SYNTHETIC_MODE: bool,  # noqa: N803 - as it is called
) -> None:  # fmt: skip
    """Of greedy requests: a rejected token is the target's most likely one."""
    assert SYNTHETIC_MODE
    rows = [True] * len(ends) if is_greedy is None else is_greedy.tolist()
    _accept(output, ends, drafted, otherwise, bonus, uniform, rates, rows)


def random(
    output: Any, ends: Any, drafted: Any, _draft_probs: Any, _target_probs: Any, bonus: Any,
    recovered: Any, uniform: Any, is_greedy: Any, _most: int, _vocab: int, rates: Any,
    NO_DRAFT_PROBS: bool, SYNTHETIC_MODE: bool,  # noqa: ARG001, N803 - as it is called
) -> None:  # fmt: skip
    """Of sampled requests: a rejected token is the recovered one."""
    assert SYNTHETIC_MODE
    _accept(output, ends, drafted, recovered, bonus, uniform, rates, [not g for g in is_greedy])


def _accept(
    output: Any, ends: Any, drafted: Any, otherwise: Any, bonus: Any, uniform: Any, rates: Any,
    rows: list[bool],
) -> None:  # fmt: skip
    start = 0
    for row, end in enumerate(ends.tolist()):
        if rows[row]:
            for position in range(end - start):
                place = start + position
                token = int(drafted[place])
                if not (float(uniform[place]) < float(rates[position]) and token >= 0):
                    output[row, position] = int(otherwise[place])
                    break
                output[row, position] = token
            else:
                output[row, end - start] = int(bonus[row])
        start = end
