"""Every option of every command arrives where it counts.

A new option needs a row here: the option, a value, and the argument of the function behind the
command in which that value must be. What that function does with it is tested elsewhere, and so are
the common options (`--json`, `--quiet` and so on).
"""

from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from option_spies import Command, Row, arrived, declared, stubs

ANY = MagicMock()
TELL = "scripts.frame.verb.Command.tell"
TWO, THREE = (ANY, ANY), (ANY, ANY, 3)
FINDING = MagicMock(verdict="PASS", details=[{"first": 1, "second": 1, "items": 1}])

OPEN = "calibration.traces.trace_folder.TraceFolder.open"
LIMITS = "calibration.passes.on_traces.position_warnings"
MEASURED = "validate.measure.measurement_file.read_measurement"
PROMPTS = "calibration.prompts.prompt_source.prompts_of"
PROMPT_FILE = "calibration.prompts.prompt_file.read_prompts"
DEVICE = "calibration.passes.memory.resolve_device"
PAGES = "validate.runs.report_pages.write_reports"
FINDINGS = "validate.runs.parity_asked.write_findings"
DRAFTS = "validate.runs.replay_run.load_for_replay"
BOTH_DRAFTS = "validate.runs.parity_runs.load_for_replay"
COMPARED = "validate.runs.replay_run"
JUDGED = "validate.runs.gate_run.judge"
PAIR_CHECK = "quantize.pairing.check_report.check_pair"


def on_traces(verb: str) -> tuple[Row, ...]:
    """Of drafts that run along traces, by `draft_on_traces`."""
    loaded = f"scripts.frame.{verb}.draft_on_traces"
    return (
        Row("--traces", "other", "folder", Path("other"), OPEN),
        Row("--num-draft-tokens", "5", "num_draft_tokens", 5, loaded),
        Row("--device", "cuda:1", "device", "cuda:1", loaded),
        Row("--target", "M", "target", Path("M"), loaded),
    )


def replayed(at: str, spy: str = "") -> tuple[Row, ...]:
    """Of `add_replay_arguments`, but for the traces."""
    return (
        Row("--num-draft-tokens", "5", f"{at}num_draft_tokens", 5, spy),
        Row("--target", "M", f"{at}target", Path("M"), spy),
        Row("--device", "cuda:1", f"{at}device", "cuda:1", spy),
        Row("--dtype", "bfloat16", f"{at}dtype", "bfloat16", spy),
        Row("--draft-sampling", "probabilistic", f"{at}draft_sampling", "probabilistic", spy),
        Row("--batch-size", "7", f"{at}batch_size", 7, spy),
        Row("--no-cache", "", f"{at}no_cache", spy=spy),
    )


def chosen_prompts(at: str = "", spy: str = "") -> tuple[Row, ...]:
    """Of `ChosenPrompts`."""
    split, column, number, seed = (
        ("prompts_split", "prompts_column", "num_prompts", "prompts_seed")
        if at
        else ("choice.split", "choice.column", "choice.num_prompts", "choice.seed")
    )
    return (
        Row("--prompts-split", "hard/test", f"{at}{split}", "hard/test", spy),
        Row("--prompts-column", "ask", f"{at}{column}", "ask", spy),
        Row("--num-prompts", "7", f"{at}{number}", 7, spy),
        Row("--prompts-seed", "5", f"{at}{seed}", 5, spy),
    )


def pages() -> tuple[Row, ...]:
    """Of `Pages`."""
    return (
        Row("--html", "r.html", "documents.*", (Path("r.html"),), PAGES),
        Row("--markdown", "r.md", "documents.*", (Path("r.md"),), PAGES),
        Row("--junit", "r.xml", "documents.*", (Path("r.xml"),), PAGES),
        Row(
            "--junit-inconclusive",
            "skipped",
            "inconclusive",
            "skipped",
            "validate.runs.report_pages.junit",
            "--junit r.xml",
        ),
        Row("--github", "", "path", Path("summary"), "validate.runs.report_pages.append_text"),
        Row("--overwrite", "", "overwrite", True, PAGES, "--html r.html"),
        Row("--golden", "g.json", "documents.*", (Path("g.json"),), PAGES),
    )


def findings() -> tuple[Row, ...]:
    """Of `FindingsFile`."""
    return (
        Row("--report", "r.json", "path", Path("r.json"), FINDINGS),
        Row("--overwrite", "", "overwrite", True, FINDINGS, "--report r.json"),
    )


WRITERS = stubs(
    "validate.runs.report_pages.page",
    "validate.runs.report_pages.markdown",
    "validate.runs.report_pages.junit",
    "validate.runs.report_pages.golden_of_report",
    "validate.runs.report_pages.golden_document",
)
SERVED = {"spy": "validate.served.joint_report.judge_measured", "beside": "--measured A B",
          "without": ("BF16", "QUANT", "--traces")}  # fmt: skip
CHOOSING = "calibration.vocabulary_rows"
CURVES = "validate.comparison.vocabulary_curve"
CURVE = {"beside": "--curve", "without": ("--size", "--out")}
RECORDED_BY = "--engine vllm --shared FOLDER"

COMMANDS = (
    Command("recipes list", "quantize.engines.listed_recipes.places", (
        Row("--engine", "sglang", "asked.engine", "sglang"),
        Row("--gpu", "b200", "asked.gpu", "b200"),
        Row("--family", "eagle3-mla", "asked.family", "eagle3-mla"),
    )),
    Command("recipes show RECIPE", "scripts.verbs.recipes.named_recipe", (
        Row("RECIPE", "fp8-ptpc", "reference", "fp8-ptpc"),
    )),
    Command("recipes check RECIPE", "scripts.verbs.recipes.named_recipe", (
        Row("RECIPE", "fp8-ptpc", "reference", "fp8-ptpc"),
    )),
    Command("inspect DRAFT", "quantize.inspection.resolve_draft", (
        Row("DRAFT", "a/b", "reference", "a/b"),
        Row("--subtree", "mtp", "subtree", "mtp"),
    )),
    Command("plan DRAFT --recipe int4-channel", "quantize.inspection.chosen_recipe", (
        Row("DRAFT", "a/b", "reference", "a/b", "quantize.inspection.open_draft"),
        Row("--subtree", "mtp", "subtree", "mtp", "quantize.inspection.open_draft"),
        Row("--recipe", "fp8-ptpc", "choice.recipe", "fp8-ptpc"),
        Row("--backend", "quark", "choice.backend", "quark"),
        Row("--algorithm", "gptq", "choice.algorithm", "gptq"),
        Row("--input-correction", "off", "choice.input_correction", "off"),
        Row("--kv-cache", "unit", "choice.kv_cache", "unit"),
        Row("--target-layers", "61", "target_layers", 61, "quantize.inspection.make_plan"),
    ), {"quantize.inspection.open_draft": TWO}),
    Command("estimate DRAFT --recipe int4-channel", "quantize.estimated.EstimateReport", (
        Row("DRAFT", "a/b", "reference", "a/b", "quantize.estimated.open_draft"),
        Row("--recipe", "fp8-ptpc", "reference", "fp8-ptpc",
            "quantize.estimated.named_recipe"),
        Row("--gpu", "mi355x", "machines.0.gpu.name", "mi355x"),
        Row("--num-draft-tokens", "5", "asked", 5,
            "quantize.estimated.checked_num_draft_tokens"),
        Row("--context", "77", "served.context", 77, "quantize.estimated.candidates_of"),
        Row("--concurrency", "3", "concurrency", 3),
        Row("--tp", "2", "served.tp", 2, "quantize.estimated.candidates_of"),
        Row("--efficiency", "0.5", "machines.0.efficiency", 0.5),
        Row("--target-step-ms", "14", "verify_seconds", 0.014),
        Row("--forward", "target=a.json", "given", ("target=a.json",),
            "quantize.estimated.read_measured", "--gpu h200"),
        Row("--target-layers", "61", "target_layers", 61, "quantize.estimated.make_plan"),
    ), {
        "quantize.estimated.open_draft": TWO,
        "quantize.estimated.read_measured": None,
        "quantize.estimated.usual_context": 4096,
        **stubs("quantize.estimated.checked_num_draft_tokens",
                "quantize.estimated.candidates_of", "quantize.estimated.make_plan",
                "quantize.estimated._loaded_by", TELL),
    }),
    Command("vocab DRAFT --traces TRACES --size 300 --out OUT",
            "calibration.vocabulary_rows.cut_vocabulary", (
        Row("DRAFT", "a/b", "reference", "a/b", f"{CURVES}.resolve_draft"),
        Row("--traces", "other", "folder", Path("other"), f"{CURVES}.open_traces"),
        Row("--size", "77", "size", 77, "calibration.vocabulary_rows.chosen_rows"),
        Row("--coverage", "99.5%", "coverage", 0.995, "calibration.vocabulary_rows.chosen_rows",
            without=("--size",)),
        Row("--out", "o", "out", Path("o")),
        Row("--counts", "c.json", "counts", Path("c.json"), f"{CURVES}.choosing_of"),
        Row("--target", "M", "target", Path("M"), f"{CURVES}.choosing_of"),
        Row("--draft-sampling", "probabilistic", "where", "--draft-sampling",
            "validate.comparison.vocab_asked.ReplayError"),
        Row("--curve", "", "", True, f"{CURVES}.size_curve",
            without=("--size", "--out")),
        Row("--sizes", "32,16", "sizes", (16, 32), f"{CURVES}.size_curve", **CURVE),
        Row("--judge", "other", "judge.given", Path("other"),
            f"{CURVES}.size_curve", **CURVE),
        Row("--batch-size", "7", "batch_size", 7, f"{CURVES}.size_curve", **CURVE),
        Row("--num-draft-tokens", "5", "asked", 5,
            f"{CURVES}.chosen_num_draft_tokens", **CURVE),
        Row("--device", "cuda:1", "how.device", "cuda:1",
            f"{CURVES}.load_for_replay", **CURVE),
        Row("--dtype", "bfloat16", "how.dtype", "bfloat16",
            f"{CURVES}.load_for_replay", **CURVE),
        Row("--gpu", "b200", "serving.machines.0.gpu.name", "b200",
            f"{CURVES}.size_estimate", **CURVE),
        Row("--concurrency", "5,3", "serving.concurrencies", (3, 5),
            f"{CURVES}.size_estimate", **CURVE),
        Row("--target-step-ms", "14.2", "text", "14.2",
            f"{CURVES}.parse_step_times", **CURVE),
        Row("--plot", "p.svg", "documents.*", (Path("p.svg"),),
            f"{CURVES}.write_reports", **CURVE),
    ), {
        f"{CURVES}.choosing_of": MagicMock(is_quantized=False, least=1),
        f"{CURVES}.usual_sizes": (16,),
        **stubs(f"{CURVES}.open_traces", f"{CURVES}.resolve_draft", f"{CURVES}.load_for_replay",
                "calibration.vocabulary_rows.chosen_rows", f"{CURVES}.check_same_target",
                f"{CURVES}.check_apart",
                f"{CURVES}.seen_prompts",
                f"{CURVES}.chosen_num_draft_tokens",
                f"{CURVES}.size_curve", f"{CURVES}.drawing",
                f"{CURVES}.size_estimate", f"{CURVES}.write_reports",
                "calibration.vocabulary_rows.cut_vocabulary",
                TELL),
    }),
    Command("quantize DRAFT --recipe int4-channel --out OUT",
            "scripts.verbs.quantize.quantize.run", (
        Row("DRAFT", "a/b", "settings.draft", "a/b"),
        Row("--subtree", "mtp", "settings.subtree", "mtp"),
        Row("--recipe", "fp8-ptpc", "settings.recipe", "fp8-ptpc"),
        Row("--backend", "quark", "settings.backend", "quark"),
        Row("--algorithm", "gptq", "settings.algorithm", "gptq"),
        Row("--input-correction", "off", "settings.input_correction", "off"),
        Row("--kv-cache", "absmax", "settings.kv_cache", "absmax"),
        Row("--target-layers", "61", "settings.target_layers", 61),
        Row("--out", "other", "settings.out", Path("other")),
        Row("--traces", "T", "settings.traces", Path("T")),
        Row("--input-scale", "0.5", "settings.input_scale", 0.5),
        Row("--num-draft-tokens", "5", "settings.num_draft_tokens", 5),
        Row("--vocab-size", "77", "settings.vocab_size", 77, beside="--traces T"),
        Row("--vocab-coverage", "99.5%", "settings.vocab_coverage", 0.995, beside="--traces T"),
        Row("--device", "cuda:1", "settings.device", "cuda:1"),
        Row("--target", "M", "settings.target", Path("M")),
        Row("--allow-zero-rows", "", "settings.allow_zero_rows"),
        Row("--precise", "", "settings.precise"),
        Row("--fix-config", "", "settings.fix_config"),
    )),
    Command("verify QUANT --against DRAFT", "quantize.verify.verification.verify", (
        Row("QUANT", "a/b", "settings.output", "a/b", "scripts.verbs.verify.verify.run"),
        Row("--against", "a/b", "settings.against", "a/b", "scripts.verbs.verify.verify.run"),
        Row("--subtree", "mtp", "subtree", "mtp", "quantize.verify.verification.resolve_draft"),
        Row("--foreign", "", "foreign"),
        Row("--layer", "a/b", "settings.layer", "a/b", "scripts.verbs.verify.verify.run"),
        Row("--target", "M", "target", Path("M")),
    ), {
        "quantize.verify.verification.verify": MagicMock(ok=True),
        "quantize.verify.verification.resolve_draft": MagicMock(hub_id=None),
        **stubs("quantize.verify.verification._check_sides", TELL),
    }),
    Command("dequantize QUANT --out OUT", "quantize.converting.dequantize_draft.dequantize_draft", (
        Row("QUANT", "a/b", "reference", "a/b", "scripts.verbs.dequantize.resolve_draft"),
        Row("--subtree", "mtp", "subtree", "mtp", "scripts.verbs.dequantize.resolve_draft"),
        Row("--out", "other", "out", Path("other")),
        Row("--dtype", "float32", "dtype", "F32"),
    ), {
        "quantize.converting.dequantize_draft.plan_dequantization": MagicMock(bytes_after=1),
        **stubs("scripts.verbs.dequantize.resolve_draft"),
    }),
    Command("unpickle DRAFT --out OUT", "quantize.making.unpickle_draft.unpickle_draft", (
        Row("DRAFT", "a/b", "reference", "a/b", "scripts.verbs.unpickle.resolve_draft"),
        Row("--out", "other", "out", Path("other")),
    ), stubs("scripts.verbs.unpickle.resolve_draft")),
    Command("transcode QUANT --out OUT", "quantize.converting.transcode_draft.plan_transcoding", (
        Row("QUANT", "a/b", "source.given", "a/b"),
        Row("--layout", "quark", "layout", "quark"),
        Row("--carrier", "none", "carrier", "none"),
        Row("--target-layers", "61", "target_layers", 61),
        Row("--out", "other", "out", Path("other"),
            "quantize.converting.transcode_draft.transcode_draft"),
    ), {
        "quantize.converting.transcode_draft.plan_transcoding": MagicMock(bytes_after=1),
        **stubs("scripts.verbs.transcode.resolve_draft"),
    }),
    Command("graft TARGET LAYER --out OUT", "quantize.grafting.graft_layer.graft_layer", (
        Row("TARGET", "M", "target", Path("M"), "quantize.grafting.graft_layer.plan_graft"),
        Row("LAYER", "a/b", "reference", "a/b", "scripts.verbs.graft.resolve_draft"),
        Row("--subtree", "mtp", "subtree", "mtp", "scripts.verbs.graft.resolve_draft"),
        Row("--replace", "", "replace", spy="quantize.grafting.graft_layer.plan_graft"),
        Row("--link", "symbolic", "link", "symbolic"),
        Row("--out", "other", "out", Path("other")),
    ), {
        "quantize.grafting.graft_layer.plan_graft": MagicMock(written_bytes=1),
        **stubs("scripts.verbs.graft.resolve_draft"),
    }),
    Command("check DRAFT --engine vllm", "quantize.pairing.check_report.check_draft", (
        Row("DRAFT", "a/b", "reference", "a/b", "quantize.pairing.check_report.resolve_draft"),
        Row("--engine", "sglang", "asked.engine", "sglang"),
        Row("--version", "1.2", "asked.version", "1.2"),
        Row("--tp", "2", "asked.tp", 2),
        Row("--target-layers", "61", "asked.target_layers", 61),
        Row("--target", "t", "asked.target", "t", PAIR_CHECK),
        Row("--target", "t", "reference", "t", "quantize.pairing.check_report.resolve_target"),
        Row("--target-args", "words", "asked.target_args", "words", PAIR_CHECK, "--target t"),
        Row("--subtree", "mtp", "asked.subtree", "mtp", PAIR_CHECK, "--target t"),
        Row("--traces", "other", "folder", Path("other"), OPEN, "--target t"),
        Row("--gpu", "b200", "asked.arch", "sm100"),
    ), {
        "quantize.pairing.check_report.check_draft": MagicMock(verdict="LOADS"),
        PAIR_CHECK: MagicMock(verdict="LOADS", exit_code=0),
        **stubs("quantize.pairing.check_report.resolve_draft",
                "quantize.pairing.check_report.resolve_target",
                OPEN, TELL),
    }),
    Command("clean FOLDER", "quantize.files.staging.clean_folder", (
        Row("FOLDER", ".", "parent", Path()),
        Row("--older-than", "5", "older_than", 5),
        Row("--cache", "", "settings.cache", spy="scripts.verbs.clean.clean.run"),
    )),
    Command("record --target M --prompts P --out OUT", "scripts.verbs.record.record.run", (
        Row("--target", "other", "settings.target", Path("other")),
        Row("--prompts", "other", "settings.prompts", Path("other")),
        *chosen_prompts("settings."),
        Row("--too-long", "skip", "settings.too_long", "skip"),
        Row("--turns", "all", "settings.turns", "all"),
        Row("--continue", "", "settings.continued"),
        Row("--out", "other", "settings.out", Path("other")),
        Row("--draft", "a/b", "settings.draft", "a/b"),
        Row("--fused", "", "settings.fused", beside="--draft DRAFT"),
        Row("--aux-layers", "2,30", "settings.aux_layer_ids", (2, 30)),
        Row("--tables", "", "settings.tables"),
        Row("--table-ids", "3,4", "settings.table_ids", (3, 4), beside="--tables"),
        Row("--max-new-tokens", "7", "settings.max_new_tokens", 7),
        Row("--ignore-eos", "", "settings.ignore_eos"),
        Row("--temperature", "0.7", "settings.temperature", 0.7),
        Row("--top-p", "0.9", "settings.top_p", 0.9),
        Row("--top-k", "40", "settings.top_k", 40),
        Row("--seed", "5", "settings.seed", 5),
        Row("--logprobs", "", "settings.logprobs"),
        Row("--top-logprobs", "3", "settings.top_logprobs", 3),
        Row("--dtype", "bfloat16", "settings.dtype", "bfloat16"),
        Row("--feature-storage", "zstd", "settings.feature_storage", "zstd"),
        Row("--batch-size", "7", "settings.batch_size", 7),
        Row("--fixed-batches", "", "settings.fixed_batches"),
        Row("--device", "cuda:1", "settings.device", "cuda:1"),
        Row("--device-map", "auto", "settings.device_map", "auto"),
        Row("--ray", "local", "settings.ray", "local", beside="--fixed-batches"),
        Row("--engine", "vllm", "settings.engine", "vllm"),
        Row("--engine-arg", "tensor-parallel-size=8", "settings.engine_args",
            {"tensor_parallel_size": 8}, beside="--engine vllm"),
        Row("--server", "http://h http://i", "settings.server", ("http://h", "http://i"),
            beside=RECORDED_BY),
        Row("--shared", "other", "settings.shared", Path("other"),
            beside="--engine vllm --server http://h"),
        Row("--print-server-args", "", "settings.print_server_args", beside=RECORDED_BY),
    )),
    Command("traces import DUMP --from specforge --target M --out OUT",
            "calibration.dumps.import_dump.import_dump", (
        Row("DUMP", "other", "dump", Path("other")),
        Row("--from", "vllm", "written_by", "vllm"),
        Row("--target", "other", "target", Path("other")),
        Row("--out", "other", "out", Path("other")),
        Row("--draft", "a/b", "reference", "a/b", "calibration.dumps.import_dump.folder_of"),
        Row("--aux-layers", "2,30", "declared.layer_ids", (2, 30)),
        Row("--prompts", "P", "prompts.given", Path("P")),
        Row("--greedy", "", "declared.greedy"),
        Row("--leave-out-off-policy", "", "leave_out_off_policy"),
        Row("--tables", "", "table_ids", ()),
        Row("--table-ids", "3,4", "table_ids", (3, 4), beside="--tables"),
    ), stubs("calibration.dumps.import_dump.read_prompts",
            "calibration.traces.target_tables.TargetTables.find")),
    Command("traces info TRACES", OPEN, (Row("TRACES", "other", "folder", Path("other")),)),
    Command("traces split TRACES --out A B --count 3", "calibration.traces.sets.split_traces", (
        Row("TRACES", "other", "traces.given", Path("other")),
        Row("--out", "P Q", "first", Path("P")),
        Row("--out", "P Q", "second", Path("Q")),
        Row("--count", "5", "count", 5),
        Row("--fraction", "25%", "count", 0, without=("--count",)),  # of no traces
        Row("--category", "code chat", "categories", ("code", "chat"), without=("--count",)),
        Row("--seed", "5", "seed", 5),
    ), stubs(OPEN)),
    Command("traces merge TRACES --out OUT", "calibration.traces.sets.merge_traces", (
        Row("TRACES", "P Q", "folders.1.given", Path("Q")),
        Row("--out", "other", "out", Path("other")),
    ), stubs(OPEN)),
    Command("traces store TRACES --feature-storage zstd --out OUT",
            "calibration.traces.sets.store_traces", (
        Row("TRACES", "other", "traces.given", Path("other")),
        Row("--out", "other", "out", Path("other")),
        Row("--feature-storage", "exact", "choice", "exact"),
    ), stubs(OPEN)),
    Command("replay DRAFT --traces TRACES", DRAFTS, (
        Row("DRAFT", "P a/b", "folders.1.given", "a/b"),
        Row("--traces", "other", "folder", Path("other"), OPEN),
        *replayed("how."),
        Row("--draft-sampling", "probabilistic", "draft_sampling", "probabilistic",
            "validate.counting.replaying.replay_drafts"),
        Row("--batch-size", "7", "batch_size", 7, "validate.counting.replaying.replay_drafts"),
        Row("--rope-theta", "5e5", "how.rotary_base", 5e5),
        Row("--head-online", "nvfp4", "how.head_online", "nvfp4"),
        Row("--kv-cache-dtype", "fp8_e4m3", "how.kv_cache_dtype", "fp8_e4m3"),
        Row("--ray", "local", "how.ray", "local"),
        Row("--golden", "g.json", "path", Path("g.json"), "validate.runs.replay_run.check_golden",
            "--draft-sampling greedy"),
        Row("--overwrite", "", "overwrite", True, "validate.runs.replay_run.check_golden"),
    ), {
        LIMITS: (),
        "validate.runs.replay_run.check_golden": None,
        "validate.runs.replay_run.write_golden": None,
        DRAFTS: MagicMock(traces=[]),
        "validate.counting.replaying.replay_drafts": [
            MagicMock(**{"traces.features.fault.return_value": ""})],
        **stubs(OPEN, "calibration.passes.on_traces.folder_of",
                "validate.counting.replaying.chosen_num_draft_tokens",
                "scripts.verbs.replay.print_replays"),
    }),
    Command("measure --server http://h --engine vllm --prompts P --out r.jsonl",
            "validate.runs.measure_run.measure", (
        Row("--server", "http://i", "server.url", "http://i"),
        Row("--engine", "sglang", "protocol.given", "sglang"),
        Row("--prompts", "other", "reference", Path("other"), PROMPTS),
        *chosen_prompts(spy=PROMPTS),
        Row("--out", "other.jsonl", "out", Path("other.jsonl")),
        Row("--show", "R", "path", Path("R"), "validate.runs.measure_run.read_measurement"),
        Row("--tokenizer", "M", "target", Path("M"),
            "validate.runs.measure_run.PromptEncoder"),
        Row("--draft", "a/b", "plan.draft.given", "a/b"),
        Row("--served-as", "/d", "served_as", "/d", "validate.runs.measure_run.draft_identity",
            "--draft DRAFT"),
        Row("--model", "m", "plan.model", "m"),
        Row("--max-new-tokens", "7", "plan.ask.max_new_tokens", 7),
        Row("--ignore-eos", "", "plan.ask.ignore_eos"),
        Row("--temperature", "0.7", "plan.ask.decoding.temperature", 0.7),
        Row("--top-p", "0.9", "plan.ask.decoding.top_p", 0.9, beside="--temperature 1"),
        Row("--top-k", "40", "plan.ask.decoding.top_k", 40, beside="--temperature 1"),
        Row("--seed", "5", "plan.ask.decoding.seed", 5),
        Row("--top-logprobs", "2", "plan.ask.decoding.num_top_logprobs", 2),
        Row("--concurrency", "3", "plan.concurrency", 3),
        Row("--warm-up", "4", "plan.num_warm_up", 4),
        Row("--max-requests-per-second", "2.5", "server.most_per_second", 2.5),
        Row("--timeout", "33", "server.patience.seconds", 33),
        Row("--attempts", "2", "server.patience.attempts", 2),
        Row("--golden", "g.json", "path", Path("g.json"), "validate.runs.measure_run.check_golden"),
        Row("--overwrite", "", "overwrite", True, "validate.runs.measure_run.check_golden"),
    ), {
        PROMPTS: MagicMock(passed_over=()),
        **stubs("validate.runs.measure_run.check_golden", "validate.runs.measure_run.write_golden",
                "validate.runs.measure_run.golden_of_measurement"),
        **stubs("validate.runs.measure_run.PromptEncoder",
                "validate.runs.measure_run.measure", "scripts.frame.verb.Command.tell",
                "validate.runs.measure_run.get_protocol",
                "validate.runs.measure_run.draft_identity"),
    }),
    Command("gate BF16 QUANT --traces TRACES", "validate.runs.gate_run.replayed", (
        Row("BF16", "a/b", "asked.baseline", "a/b"),
        Row("QUANT", "a/b", "asked.candidate", "a/b"),
        Row("--ray", "local", "asked.ray", "local"),
        Row("--traces", "other", "asked.traces", Path("other")),
        *replayed("asked."),
        Row("--head-online", "fp8", "asked.head_online", "fp8"),
        Row("--kv-cache-dtype", "fp8_e4m3", "asked.kv_cache_dtype", "fp8_e4m3"),
        Row("--policy", "screening", "policy.name", "screening", spy=JUDGED),
        Row("--max-relative-drop", "2%", "policy.max_relative_drop", 0.02, spy=JUDGED),
        Row("--confidence", "0.9", "policy.confidence", 0.9, spy=JUDGED),
        Row("--min-prompts", "7", "policy.min_prompts", 7, spy=JUDGED),
        Row("--every-category-passes", "", "policy.every_category_passes", spy=JUDGED),
        Row("--unrecorded", "", "policy.record_required", False, spy=JUDGED),
        Row("--look", "2/3", "look.number", 2, spy=JUDGED),
        Row("--look", "2/3", "look.total", 3, spy=JUDGED),
        Row("--spending", "pocock", "look.spending", "pocock", spy=JUDGED, beside="--look 2/3"),
        Row("--unrelated", "", "asked.unrelated"),
        Row("--unrecorded", "", "policy.record_required", False, spy=JUDGED),
        Row("--expect-baseline", "2.5", "asked.expect_baseline", 2.5),
        Row("--measured", "P Q", "baseline.given", Path("P"), **SERVED | {"beside": ""}),
        Row("--measured", "P Q", "candidate.given", Path("Q"), **SERVED | {"beside": ""}),
        Row("--policy", "screening", "policy.name", "screening", **SERVED),
        Row("--look", "2/3", "look.number", 2, **SERVED),
        Row("--unrelated", "", "background.unrelated", **SERVED),
        Row("--expect-baseline", "2.5", "background.expected_baseline", 2.5, **SERVED),
        Row("--baseline-again", "C", "again.given", Path("C"),
            **SERVED | {"spy": "validate.served.joint_report.server_noise"}),
        Row("--parity", "F", "path", Path("F"), "validate.runs.gate_run.read_parity"),
        Row("--report", "r.json", "documents.*", (Path("r.json"),), PAGES),
        *pages(),
    ), {
        "validate.runs.gate_run._drafts_and_engines": TWO,
        "validate.runs.gate_run.replayed": MagicMock(replays=TWO),
        **WRITERS,
        **stubs("validate.runs.gate_run.read_measurement", PAGES, JUDGED,
                "validate.served.joint_report.judge_measured",
                "validate.runs.gate_run.document_of",
                "validate.runs.gate_run.document_text", "validate.runs.gate_run.parse_report",
                "scripts.verbs.gate.print_replays", "scripts.verbs.gate.print_gate"),
    }),
    Command("compare DRAFT --traces TRACES", "validate.runs.replay_run.compare", (
        Row("DRAFT", "P a/b", "folders.1.given", "a/b", f"{COMPARED}.replay_in_groups"),
        Row("--traces", "other", "folder", Path("other"), OPEN),
        *replayed("how.", f"{COMPARED}.replay_in_groups"),
        Row("--traffic", "chat=0.7,code=30%", "traffic", {"chat": 0.7, "code": 0.3}),
        Row("--confidence", "90%", "confidence", 0.9),
        Row("--html", "r.html", "documents.*", (Path("r.html"),),
            f"{COMPARED}.write_reports"),
        Row("--plot", "r.svg", "documents.*", (Path("r.svg"),),
            f"{COMPARED}.write_reports"),
        Row("--report", "r.json", "documents.*", (Path("r.json"),),
            f"{COMPARED}.write_reports"),
        Row("--overwrite", "", "overwrite", True, f"{COMPARED}.write_reports"),
    ), {LIMITS: ()} | stubs(
             OPEN, "validate.judging.candidate_origin.DraftFolder.read",
             "calibration.passes.on_traces.folder_of",
             f"{COMPARED}.replay_in_groups",
             "validate.runs.replay_run.of_replays",
             "validate.runs.replay_run.compare",
             "validate.runs.replay_run.page",
             "validate.runs.replay_run.drawing",
             "validate.runs.replay_run.text_of",
             "scripts.frame.verb.Command.tell")),
    Command("report G.json", "validate.runs.report_pages.read_report", (
        Row("G.json", "other.json", "path", Path("other.json")),
        *pages(),
    ), {**WRITERS, **stubs("validate.runs.report_pages.read_report",
                           "scripts.verbs.report.print_document")}),
    Command("golden G.json", "scripts.verbs.golden.golden.run", (
        Row("G.json", "other.json", "settings.golden", Path("other.json")),
        Row("--for", "vllm", "settings.to", "vllm"),
        Row("--category", "code", "settings.category", "code"),
        Row("--category-label", "job", "settings.category_label", "job",
            beside="--for grafana"),
        Row("--engine", "sglang", "settings.engine", "sglang", beside="--for grafana"),
        Row("--model", "m", "settings.model", "m", beside="--for prometheus"),
        Row("--max-drop", "5%", "settings.max_drop", 0.05, beside="--for grafana"),
        Row("--window", "30m", "settings.window", "30m", beside="--for prometheus"),
        Row("--out", "r.yml", "settings.out", Path("r.yml"), beside="--for prometheus"),
        Row("--overwrite", "", "settings.overwrite"),
    ), {"scripts.verbs.golden.golden.run": MagicMock(text="", notes=(), out=None),
        **stubs("scripts.frame.verb.Command.tell")}),
    Command("card FOLDER", "validate.report.model_card.model_card", (
        Row("FOLDER", "other", "folder", Path("other")),
        Row("--gate", "G.json", "request.gate", Path("G.json")),
        Row("--measured", "P Q", "request.measured", (Path("P"), Path("Q"))),
        Row("--base-model", "a/b", "request.base_model", "a/b"),
        Row("--license", "mit", "request.license", "mit"),
        Row("--name", "a/b", "request.name", "a/b"),
        Row("--out", "other.md", "path", Path("other.md"), "scripts.verbs.card.replace_text"),
        Row("--overwrite", "", "", True, "scripts.verbs.card.replace_text",
            "--out FOLDER/README.md"),
    ), {"validate.report.model_card.model_card": "text"}),
    Command("parity divergence PLAIN SPECULATIVE",
            "validate.runs.parity_runs.divergence_findings",
            (
        Row("PLAIN", "other", "plain.given", Path("other")),
        Row("SPECULATIVE", "P Q", "speculative.1.given", Path("Q")),
        Row("--plain-again", "R", "plain_again.given", Path("R")),
        Row("--max-gap", "0.2", "max_gap", 0.2),
        Row("--max-hazard-ratio", "1.5", "max_hazard_ratio", 1.5),
        Row("--min-prompts", "7", "min_prompts", 7),
        *findings(),
    ), {
        "validate.runs.parity_runs.divergence_findings": [FINDING],
        **stubs("validate.runs.parity_runs.read_measurement", "scripts.frame.verb.Command.tell"),
    }),
    Command("parity tasks A_SAMPLES B_SAMPLES", "validate.runs.parity_runs.task_findings", (
        Row("A_SAMPLES", "other", "first.given", Path("other")),
        Row("B_SAMPLES", "other", "second.given", Path("other")),
        Row("--max-score-drop", "2%", "max_score_drop", 0.02),
        Row("--higher-is-better", "f1 em", "directions.higher", ("f1", "em")),
        Row("--lower-is-better", "f1 em", "directions.lower", ("f1", "em")),
        Row("--confidence", "90%", "confidence", 0.9),
        *findings(),
    ), {
        "validate.runs.parity_runs.task_findings": [FINDING],
        **stubs("validate.runs.parity_runs.read_samples",
                "scripts.frame.verb.Command.tell"),
    }),
    Command("parity run-tasks --server http://h --engine vllm --tasks gsm8k --out OUT",
            "validate.parity.lm_eval_tasks.run_tasks", (
        Row("--server", "http://i", "asked.server", "http://i"),
        Row("--engine", "sglang", "asked.engine", "sglang"),
        Row("--model", "m", "asked.model", "m"),
        Row("--tokenizer", "M", "asked.tokenizer", Path("M")),
        Row("--tasks", "gsm8k,mmlu", "asked.tasks", ("gsm8k", "mmlu")),
        Row("--out", "other", "asked.out", Path("other")),
        Row("--chat", "", "asked.chat"),
        Row("--include-path", "D", "asked.include_path", Path("D")),
        Row("--num-fewshot", "3", "asked.num_fewshot", 3),
        Row("--limit", "7", "asked.limit", 7),
        Row("--seed", "5", "asked.seed", 5),
        Row("--concurrency", "3", "asked.concurrency", 3),
        Row("--max-retries", "2", "asked.max_retries", 2),
        Row("--timeout", "33", "asked.timeout", 33),
        Row("--max-length", "99", "asked.max_length", 99),
        Row("--gen-kwargs", "temperature=0", "asked.gen_kwargs", "temperature=0"),
        Row("--confirm-run-unsafe-code", "", "asked.confirm_run_unsafe_code"),
        Row("--lm-eval", "other", "asked.lm_eval", "other"),
    ), stubs("validate.parity.task_run.TaskRun.check")),
    Command("parity sampled PLAIN SPECULATIVE --prompts P --target M",
            "validate.runs.parity_runs.sampled_finding", (
        Row("PLAIN", "other", "plain.given", Path("other")),
        Row("SPECULATIVE", "other", "speculative.given", Path("other")),
        Row("--prompts", "other", "reference", Path("other"), PROMPTS),
        *chosen_prompts(spy=PROMPTS),
        Row("--tokenizer", "K", "target", Path("K"),
            "validate.runs.parity_runs.PromptEncoder"),
        Row("--target", "other", "target", Path("other"),
            "validate.runs.parity_runs.score_by_target"),
        Row("--score-server", "http://h", "url", "http://h",
            "validate.runs.parity_runs.score_by_server", "--score-engine vllm", ("--target",)),
        Row("--score-engine", "sglang", "engine", "sglang",
            "validate.runs.parity_runs.score_by_server", "--score-server http://h",
            ("--target",)),
        Row("--concurrency", "3", "concurrency", 3, "validate.runs.parity_runs.score_by_server",
            "--score-server http://h --score-engine vllm", ("--target",)),
        Row("--device", "cuda:1", "name", "cuda:1", "validate.runs.parity_runs.resolve_device"),
        Row("--dtype", "bfloat16", "dtype", torch.bfloat16,
            "validate.runs.parity_runs.score_by_target"),
        Row("--max-logprob-drop", "0.2", "max_logprob_drop.most", 0.2),
        Row("--confidence", "90%", "confidence", 0.9),
        *findings(),
    ), {
        "validate.runs.parity_runs.sampled_finding": FINDING,
        "validate.runs.parity_runs.texts_of": [],
        "validate.runs.parity_runs.score_by_target": [],
        PROMPTS: MagicMock(passed_over=()),
        **stubs("validate.runs.parity_runs.read_measurement",
                "validate.runs.parity_runs.resolve_device",
                "validate.runs.parity_runs.check_sampled",
                "validate.runs.parity_runs.PromptEncoder",
                "scripts.frame.verb.Command.tell"),
    }),
    Command("parity draft BF16 QUANT --traces TRACES",
            "validate.runs.parity_runs.draft_findings", (
        Row("BF16", "a/b", "folders.0.given", "a/b", BOTH_DRAFTS),
        Row("QUANT", "a/b", "folders.1.given", "a/b", BOTH_DRAFTS),
        Row("--traces", "other", "folder", Path("other"), OPEN),
        Row("--num-draft-tokens", "5", "asked", 5,
            "validate.runs.parity_runs.chosen_num_draft_tokens"),
        *(row for row in replayed("how.", BOTH_DRAFTS)
          if row.option not in ("--draft-sampling", "--batch-size", "--no-cache")),
        Row("--top", "7", "top", 7),
        Row("--top", "7", "top", 7, "validate.runs.parity_runs.draft_agreement"),
        *(Row(f"--{limit}", "0.2", f"allowed.{limit.replace('-', '_')}", 0.2)
          for limit in ("max-kl", "min-agreement", "min-top-agreement", "min-overlap",
                        "max-right-drop", "max-perplexity-rise", "max-alpha-drop")),
        Row("--confidence", "90%", "confidence", 0.9),
        *findings(),
    ), {
        BOTH_DRAFTS: MagicMock(both=TWO),
        "validate.runs.parity_runs.draft_findings": [FINDING],
        **stubs(OPEN, "validate.runs.parity_runs.folder_of",
                "validate.runs.parity_runs.chosen_num_draft_tokens",
                "validate.runs.parity_runs.draft_agreement",
                "validate.runs.parity_runs.draft_identity",
                "scripts.verbs.parity._print_parts",
                "scripts.frame.verb.Command.tell"),
    }),
    Command("completion SHELL", "shtab.complete", (
        Row("SHELL", "zsh", "shell", "zsh"),
    )),
)  # fmt: skip
"""One for every command, in the order of `draftquant --help`."""

CASES = [(command, row) for command in COMMANDS for row in command.rows]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a card to replace, in a step of GitHub Actions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary")
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FOLDER" / "README.md").write_text("", encoding="utf-8")


@pytest.mark.parametrize(
    ("command", "row"), CASES, ids=[f"{command.name} {row.option}" for command, row in CASES]
)
def test_an_option_arrives(command: Command, row: Row) -> None:
    assert arrived(command, row) == row.value
    assert arrived(command, row, with_option=False) != row.value  # or it would prove nothing


def test_every_option_has_a_row() -> None:
    rows = {(command.name, row.option) for command, row in CASES}
    options = set(declared())
    assert options - rows == set(), "a new option needs a row in COMMANDS"
    assert rows - options == set(), "there is no such option"
