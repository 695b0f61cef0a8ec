"""What tests/test_measure_kills.py starts: for each line that it is told, a child that measures.

Usage: `python measuring_process.py URL OUT`. It says the child's process number, and when the child
has ended, its exit code. So the imports, which take longer than all the rest, are made once.
"""

import os
import signal
import sys
from pathlib import Path

from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.decoding import GREEDY
from draftquant.calibration.server_client import Patience
from draftquant.validate.measure.measuring import MeasurePlan, ServerAddress, measure
from draftquant.validate.measure.server_answers import Ask
from draftquant.validate.measure.vllm_server import VLLMProtocol

PROMPTS = tuple(Prompt(id=f"{i}", category="ab"[i % 2], token_ids=(i, 3, i % 7)) for i in range(60))
ASK = Ask(decoding=GREEDY, max_new_tokens=8, ignore_eos=True)
PLAN = MeasurePlan(prompts=PROMPTS, ask=ASK, concurrency=4, num_warm_up=2)
INTERRUPTED = 130


def run(url: str, out: str) -> int:
    """Measure the server there; the exit code."""
    address = ServerAddress(url=url, patience=Patience(attempts=2, first_pause=0.01, seconds=60))
    try:
        measure(Path(out), address, VLLMProtocol(), PLAN)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def main() -> None:
    """See the module."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which nohup and & take away
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(run(*sys.argv[1:]))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
