"""What SGLang, which needs a GPU, writes by its sources."""

import json
from pathlib import Path
from typing import Any

FOREIGN = Path(__file__).parent / "foreign"


def requests(name: str) -> list[dict[str, Any]]:
    """What a real server answered: prompt, output and accepted tokens of each verify step."""
    report = json.loads((FOREIGN / f"guidellm-{name}.json").read_text(encoding="utf-8"))
    found = []
    for one in report["benchmarks"][0]["requests"]["successful"]:
        found.append(
            {
                "prompt": json.loads(one["request_args"])["body"]["prompt"],
                "output": one["output"],
                "num_tokens": one["output_metrics"]["total_tokens"],
                "num_prompt_tokens": one["input_metrics"]["total_tokens"],
                "accepted": one["response_metrics"]["speculative_decoding"]["per_step_accepted"],
            }
        )
    return sorted(found, key=lambda one: one["prompt"])


def sglang(path: Path, name: str, *, logprobs: bool = True) -> Path:
    """`FileRequestMetricsExporter.write_record` of SGLang 0.5.23."""
    lines = []
    for place, one in enumerate(requests(name)):
        accepted = one["accepted"]
        sampling = {"temperature": 0.0, "max_new_tokens": 64, "ignore_eos": True}
        asked = {"text": one["prompt"], "sampling_params": sampling, "rid": f"{name}{place}"}
        line = {
            "request_parameters": json.dumps(asked),
            "id": f"{name}{place}",
            "finish_reason": {"type": "length", "length": 64},
            "prompt_tokens": one["num_prompt_tokens"],
            "completion_tokens": one["num_tokens"],
            "spec_accept_rate": sum(accepted) / (3 * len(accepted)),
            "spec_accept_length": one["num_tokens"] / len(accepted),
            "spec_num_correct_drafts": sum(accepted),
            "spec_num_proposed_drafts": 3 * len(accepted),
            "spec_verify_ct": len(accepted),
            "spec_correct_drafts_histogram": [accepted.count(j) for j in range(max(accepted) + 1)],
        }
        if logprobs:
            line["output_token_logprobs"] = [[-0.1, ord(c), c] for c in one["output"]]
        lines.append(line)
    return _lines(path, lines)


def sglang_answers(path: Path, name: str, form: str) -> Path:
    """As SGLang 0.5.23 answers: `chat` and `completion` with `sglext`, a `batch`, or `generate`."""
    lines: list[dict[str, Any]] = []
    logs = sglang(path, name).read_text(encoding="utf-8").splitlines()
    for place, (one, record) in enumerate(zip(requests(name), map(json.loads, logs), strict=True)):
        told = {key: value for key, value in record.items() if key.startswith("spec_")}
        usage = {"prompt_tokens": record["prompt_tokens"], "completion_tokens": one["num_tokens"]}
        said: Any = {"text": one["output"], "prompt_token_ids": [*one["prompt"].encode()]}
        if form == "chat":  # nothing names the prompt
            said = {"message": {"role": "assistant", "content": one["output"]}}
        answer = {"id": f"{name}{place}", "model": "target", "usage": usage, "metadata": {},
                  "object": "chat.completion" if form == "chat" else "text_completion",
                  "choices": [{"index": 0, **said, "finish_reason": "length"}],
                  "sglext": {"spec_tokens_details": told}}  # fmt: skip
        if form == "batch":
            del said["prompt_token_ids"]
            answer["choices"] = [{"index": 0, **said, "finish_reason": "length"}]
            answer = {"custom_id": f"q{place}", "response": {"body": answer}, "error": None}
        if form == "generate":
            meta = {"finish_reason": {"type": "length", "length": 64}, **usage, **told}
            answer = {"text": one["output"], "output_ids": [1], "meta_info": meta}
        lines.append(answer)
    return _lines(path, lines)


def _lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
