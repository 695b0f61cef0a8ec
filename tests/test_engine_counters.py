"""What the counters of each engine say of its verify steps, as its own page shows them."""

import pytest
from draftquant.validate.measure.measurement import EngineName
from draftquant.validate.measure.protocols.counters import Counters
from draftquant.validate.measure.protocols.engine_counters import ENGINE_COUNTERS, ServerSteps

VLLM = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 80.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 38.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 14.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 14.0
"""
SGLANG = """sglang:spec_accept_length{model_name="m"} 1.95
sglang:spec_verify_calls_total{model_name="m"} 40.0
sglang:generation_tokens_total{model_name="m",is_streaming="true"} 60.0
sglang:generation_tokens_total{model_name="m",is_streaming="false"} 22.0
sglang:num_requests_total{model_name="m",is_streaming="true"} 4.0
"""
TENSORRT_LLM = """trtllm_spec_decode_drafted_tokens_total{token_position="0"} 40.0
trtllm_spec_decode_drafted_tokens_total{token_position="1"} 39.0
trtllm_spec_decode_accepted_tokens_total{token_position="0"} 24.0
trtllm_spec_decode_accepted_tokens_total{token_position="1"} 14.0
"""


@pytest.mark.parametrize(
    ("engine", "page", "accepted_at"),
    [("vllm", VLLM, (24, 14)), ("sglang", SGLANG, None), ("tensorrt-llm", TENSORRT_LLM, (24, 14))],
)
def test_forty_steps_that_accepted_38_tokens(
    engine: EngineName, page: str, accepted_at: tuple[int, ...] | None
) -> None:
    found = ENGINE_COUNTERS[engine].read(Counters.parse(page, "page"))
    assert found == ServerSteps(verify_steps=40, accepted=38, accepted_at=accepted_at)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_server_that_drafts_nothing_counts_nothing(engine: EngineName) -> None:
    page = Counters.parse("vllm:generation_tokens_total 3\nsglang:num_requests_total 1\n", "page")
    assert ENGINE_COUNTERS[engine].read(page) is None
