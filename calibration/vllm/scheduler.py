"""vLLM's scheduler without proposals; loaded by the engine alone, by its name in `arguments`.

`extract_hidden_states` is built as a way of drafting, and proposes every token once more: a step
would read two tokens of a request, and at a temperature above 0 the rejection sampling of vLLM's
CPU build is not lossless. Nothing is proposed here: decoding is what it is without a draft.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class PlainScheduler(Scheduler):
    """vLLM's own, which is handed drafts and forgets them."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """See vLLM's `SchedulerInterface`."""
