"""vLLM's scheduler without proposals; only the engine loads it, by its name in `arguments`.

`extract_hidden_states` is built as a drafting method, and proposes every token once more: a step
would read two tokens of a request, and at a temperature above 0 the rejection sampling of vLLM's
CPU build is not lossless. Nothing is proposed here: decoding is the same as without a draft.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class PlainScheduler(Scheduler):
    """vLLM's own scheduler, which gets drafts and drops them."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """See vLLM's `SchedulerInterface`."""
