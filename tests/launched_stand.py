"""A process that is launched as SGLang: the stand of tests/stand at a given port."""

import argparse
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from stand.decoder import Decoder
from stand.server import served
from stand.sglang import SGLangStand


class HealthyStand(SGLangStand):
    def get(self, path: str) -> object:
        return "" if path == "/health" else super().get(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--draft", help="the pair's own; without it the server drafts nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    decoder = Decoder("eagle3-llama", 3)
    info = {
        "speculative_draft_model_path": options.draft,
        "speculative_draft_model_quantization": None,
    }
    stand = HealthyStand(
        decoder=decoder, drafts=options.draft is not None, info=info if options.draft else {}
    )
    with served(stand, options.port):
        ended.wait()


if __name__ == "__main__":
    main()
