"""`draftquant parity run-tasks`: let lm_eval ask a server, for 'parity tasks'."""

import argparse
import typing
from pathlib import Path

from ...validate.measure.measurement import EngineName
from ..console import print_json, stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`parity run-tasks --server URL --model NAME --tasks T,... --out DIR`."""
    parser.add_argument("--server", required=True, metavar="URL", help="http://HOST:PORT")
    parser.add_argument(
        "--engine",
        choices=typing.get_args(EngineName),
        required=True,
        help="that runs there: it is asked who it is before lm_eval begins",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="that the server calls its target by (default: it is asked)"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="the target's folder")
    parser.add_argument(
        "--tasks", required=True, metavar="TASK,...", help="by lm_eval's names, such as gsm8k"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="folder to create"
    )
    parser.add_argument(
        "--chat", action="store_true", help="send messages; the server applies its chat template"
    )
    parser.add_argument(
        "--include-path",
        type=Path,
        metavar="FOLDER",
        help="folder with task definitions of your own",
    )
    numbers = {
        "num-fewshot": ("EXAMPLES", None, "examples in each prompt (default: the task's own)"),
        "limit": ("ITEMS", None, "items per task (default: all)"),
        "seed": ("SEED", 1234, "of few-shot examples and draws (default 1234)"),
        "concurrency": ("REQUESTS", 8, "requests in flight (default 8)"),
        "max-retries": ("ATTEMPTS", 5, "attempts of each request (default 5)"),
        "timeout": ("SECONDS", 600, "seconds of a request (default 600)"),
        "max-length": ("TOKENS", 4096, "tokens of prompt and answer together (default 4096)"),
    }
    for name, (unit, default, what) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar=unit, help=what)
    parser.add_argument(
        "--gen-kwargs", metavar="KEY=VALUE,...", help="how to generate (default: as the task says)"
    )
    parser.add_argument(
        "--confirm-run-unsafe-code",
        action="store_true",
        help="tasks such as humaneval run the code that the model writes, here",
    )
    parser.add_argument(
        "--lm-eval",
        default="lm_eval",
        metavar="COMMAND",
        help="that starts lm_eval, of any environment (default lm_eval)",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...validate.parity.run_tasks import TaskRun, run_tasks

    asked = TaskRun(
        server=options.server,
        model=options.model,
        tokenizer=options.tokenizer,
        tasks=tuple(options.tasks.split(",")),
        include_path=options.include_path,
        chat=options.chat,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        seed=options.seed,
        gen_kwargs=options.gen_kwargs,
        concurrency=options.concurrency,
        max_retries=options.max_retries,
        timeout=options.timeout,
        max_length=options.max_length,
        unsafe_code=options.confirm_run_unsafe_code,
    )
    samples = run_tasks(asked, options.out, engine=options.engine, command=options.lm_eval)
    if options.json:
        print_json({task: {"samples": str(one.path), "items": {name: len(items) for name, items
                    in one.items.items()}} for task, one in samples.items()})  # fmt: skip
        return 0
    for task, one in samples.items():
        counts = ", ".join(f"{len(items):,} ({name})" for name, items in one.items.items())
        stdout().line((task, "bold"), f": items {counts}: {one.path}")
    return 0
