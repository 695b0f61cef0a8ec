"""How many drafted tokens each engine's own code verifies, and SGLang's own fit: `confidence.json`.

Usage, in the engines' environment: `python tests/engines/confidence.py ENGINE`; without ENGINE, for
both (each in a process of its own), and the file is written. `test_confidence.py` holds our rules
against it. One request is served, verify step after verify step, by logits that are written down
with the answers, in thousandths.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OUT = Path(__file__).resolve().parent / "confidence.json"
K, STEPS, SAMPLES = 6, 40, 400
PLAIN_TABLE = {
    "sample_batch_tokens": [1, 2, 4, 5, 7],
    "sample_steps_per_sec": [100.0, 96.0, 83.0, 70.0, 55.0],
    "max_batch_tokens": 64,
}
ADDITIVE_TABLE = {
    "bias_seconds": 0.004,
    "bs_probes": [1, 8],
    "alpha_seconds": [0.002, 0.009],
    "m_probes": [1, 4, 32],
    "theta_seconds": [0.001, 0.0025, 0.05],
}
COSTS = {"draft_ms": 0.9, "verify_ms": [5.0, 5.1, 5.3, 6.0, 6.1, 7.4, 8.8]}


def _thousandths(logits: Any) -> Any:
    return (1000 * logits).round().long()


def logits_of_steps() -> Any:
    """[STEPS, K] int64; among them some that leave survival below 1e-6."""
    import torch

    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(STEPS, K, generator=generator) + torch.linspace(-1, 2, STEPS)[:, None]
    logits[5:7] -= 12
    return _thousandths(logits)


def confidences() -> Any:
    """[STEPS, K] float32."""
    return (logits_of_steps() / 1000).sigmoid()


def of_sglang() -> dict[str, Any]:
    """Lengths under both kinds of tables, and temperatures."""
    import sglang_platform

    sglang_platform.install("sm90")
    import torch
    from sglang.benchmark.dspark_sts_fit import default_temperature_grid, fit_sts_temperatures
    from sglang.kernels.ops.speculative.dspark.dspark_schedule import schedule_verify_lens_topk
    from sglang.srt.speculative.dspark_components.dspark_planner import (
        DSparkScheduleConfig,
        HostConfidenceBudgetPlanner,
    )
    from sglang.srt.speculative.dspark_components.dspark_sps import (
        SpsAdditiveCostTable,
        SpsCostTable,
    )
    from sglang.srt.speculative.dspark_components.dspark_sts import DSparkStsCalibration

    config = DSparkScheduleConfig(gamma=K)
    pool = SimpleNamespace(req_to_token=torch.zeros(2, 1))
    one = torch.ones(1, dtype=torch.int64)

    def lengths(table: Any) -> list[int]:
        planner = HostConfidenceBudgetPlanner(
            sps_table=table,
            cfg=config,
            model_runner=SimpleNamespace(req_to_token_pool=pool),
            relay_lag_steps=0,  # as without the overlap schedule
        )
        found = []
        for own in confidences():
            budget = planner.compute_budget(
                confidence=own[None],
                generation=one,
                current_generation=one,
                req_pool_indices_cpu=one,
            )
            scheduled = schedule_verify_lens_topk(confidence=own[None], budget=budget, cfg=config)
            found.append(int(scheduled) - 1)
        return found

    generator = torch.Generator().manual_seed(1)
    thousandths = _thousandths(1.5 * torch.randn(SAMPLES, K, generator=generator))
    logits = thousandths / 1000
    drawn = torch.rand(SAMPLES, K, generator=generator) < (logits / 2 - 0.3).sigmoid()
    reached = drawn.long().cumprod(1)
    fit = fit_sts_temperatures(logits=logits, prefix_mask=reached, grid=default_temperature_grid())
    written = DSparkStsCalibration(**fit, dataset="random", num_samples=SAMPLES)
    with_more = json.dumps({**json.loads(written.to_json()), "fitted_on": [{"sha256": []}]})
    assert DSparkStsCalibration.from_json(with_more) == written
    return {
        "logits": logits_of_steps().tolist(),
        "plain": lengths(SpsCostTable(**PLAIN_TABLE)),
        "additive": lengths(SpsAdditiveCostTable(**ADDITIVE_TABLE)),
        "fit": {"logits": thousandths.tolist(), "accepted": reached.sum(1).tolist(), **fit},
    }


class _Buffer:
    """A `CpuGpuBuffer` whose copy has landed when it is asked for."""

    def __init__(self, torch: Any) -> None:
        self.gpu = torch.ones(1, K)
        self.cpu = torch.ones(1, K)
        self.np = self.cpu.numpy()

    def copy_to_cpu(self) -> None:
        self.cpu.copy_(self.gpu)


def of_vllm() -> dict[str, Any]:
    """Lengths under measured costs."""
    import contextlib
    from unittest.mock import MagicMock, patch

    import numpy as np
    import torch
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as engine

    manager = object.__new__(engine.AdaptiveVerificationManager)
    states = SimpleNamespace(
        req_id_to_index={"r": 0},
        num_computed_tokens_np=np.array([10]),
        prefill_len=SimpleNamespace(np=np.array([10])),
        device="cpu",
    )
    manager.__dict__ |= {
        "req_states": states,
        "num_speculative_steps": K,
        "num_bonus_tokens": 1,
        "_max_total_logits": 1000,
        "_confidence_probs": torch.ones(1, K),
        "_stale_confidences": [_Buffer(torch), _Buffer(torch)],
        "_copy_events": [MagicMock(), MagicMock()],
        "_copy_stream": MagicMock(),
        "_pending_resets": [],
        "_stale_idx": 0,
        "cost_tables": (
            np.array([0.0, COSTS["draft_ms"]]),
            np.array([1e-6, *COSTS["verify_ms"]]),
        ),
    }
    batch = SimpleNamespace(num_reqs=1, idx_mapping=torch.zeros(1, dtype=torch.int64))
    found = []
    free = contextlib.nullcontext
    with (
        patch.object(torch.cuda, "current_stream", MagicMock()),
        patch.object(engine, "stream", lambda *_streams: free()),
        patch.object(engine, "gpu_sync_allowed", free),
    ):
        manager.add_request(0)
        for own in confidences():
            manager.record_confidences(own[None], batch)  # behind the draft, in the step before
            tokens = manager.get_num_tokens({"r": 1 + K}, {"r": [0] * K})
            found.append(tokens - 1)
    return {"lengths": found}


def main() -> None:
    """Ask one engine, or both and write the file."""
    if len(sys.argv) > 1:
        found = {"sglang": of_sglang, "vllm": of_vllm}[sys.argv[1]]()
        print(f"\n{json.dumps(found)}")
        return
    answers = {}
    for engine in ("sglang", "vllm"):
        asked = [sys.executable, __file__, engine]
        said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
        answers[engine] = json.loads(said.splitlines()[-1])
    OUT.write_text(json.dumps(answers) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
