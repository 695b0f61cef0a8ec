"""A process that is launched as vLLM: `vllm_server` at a given port, and what it says of its draft.

Without VLLM_SERVER_DEV_MODE=1 it tells nothing of its configuration, as the real one.
"""

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from vllm_server import VLLMServer, served


class HealthyServer(VLLMServer):
    def get(self, path: str) -> Any:
        return "" if path == "/health" else super().get(path)


def told(speculative: dict[str, Any] | None) -> dict[str, Any]:
    """What /server_info says."""
    if speculative is not None:
        config = json.loads((Path(speculative["model"]) / "config.json").read_text("utf-8"))
        method = config.get("quantization_config", {}).get("quant_method")
        speculative |= {"quantization": None, "draft_model_config": {"quantization": method}}
    return {"vllm_config": {"speculative_config": speculative}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-config", type=json.loads)
    options, _ = parser.parse_known_args()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    speculative = options.speculative_config
    in_dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    server = HealthyServer(
        num_draft_tokens=speculative and speculative["num_speculative_tokens"],
        config=told(speculative) if in_dev_mode else None,
    )
    with served(server, options.port):
        ended.wait()


if __name__ == "__main__":
    main()
