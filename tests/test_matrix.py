"""Matrix files: what they say, and every problem with its line."""

from pathlib import Path

import pytest
from draftquant.calibration.recording.decoding import Decoding
from draftquant.recipes.errors import RecipeError
from draftquant.recipes.recipe_file import RecipeFileError
from draftquant.validate.launch.matrix import Matrix, load_matrix

WHOLE = """\
schema_version: 1
engine: vllm
target: /models/my target
prompts: prompts.jsonl
max_new_tokens: 64
command: >-
  python -m server --model {target} --port {port}
  --host {host}
environment: {A: "1", B: "2"}
port: 8123
concurrencies: [1, 4]
variants:
  - name: none
  - name: bf16
    draft: /drafts/b
    arguments: --config '{"method":"eagle3","model":"{draft}","num_speculative_tokens":3}'
    environment: {B: "3"}
"""


def load(tmp_path: Path, text: str) -> Matrix:
    path = tmp_path / "matrix.yaml"
    path.write_text(text, encoding="utf-8")
    return load_matrix(path)


def problems(tmp_path: Path, old: str, new: str) -> list[tuple[int, str, str]]:
    assert WHOLE.count(old) == 1
    with pytest.raises(RecipeFileError) as caught:
        load(tmp_path, WHOLE.replace(old, new))
    return [(problem.line, problem.what, problem.fix) for problem in caught.value.problems]


def test_commands_and_environments_of_variants(tmp_path: Path) -> None:
    matrix = load(tmp_path, WHOLE)
    none, bf16 = matrix.variants
    words = ("python", "-m", "server", "--model", "/models/my target", "--port", "8123",
             "--host", "127.0.0.1")  # fmt: skip
    assert matrix.command_of(none) == words
    config = '{"method":"eagle3","model":"/drafts/b","num_speculative_tokens":3}'
    assert matrix.command_of(bf16) == (*words, "--config", config)
    assert matrix.environment_of(none) == {"A": "1", "B": "2"}
    assert matrix.environment_of(bf16) == {"A": "1", "B": "3"}
    assert matrix.url == "http://127.0.0.1:8123"
    assert (matrix.concurrencies, matrix.repeats, matrix.num_warm_up) == ((1, 4), 3, 8)


def test_drawn_text_is_asked_for_with_its_seed(tmp_path: Path) -> None:
    assert load(tmp_path, WHOLE).decoding == Decoding()
    drawn = "temperature: 0.7\ntop_p: 1\ntop_k: 20\nseed: 3\nport: 8123"
    decoding = load(tmp_path, WHOLE.replace("port: 8123", drawn)).decoding
    assert decoding == Decoding(temperature=0.7, top_p=1, top_k=20, seed=3)


def test_braces_in_a_path_are_no_placeholders(tmp_path: Path) -> None:
    matrix = load(tmp_path, WHOLE.replace("/drafts/b", "/drafts/{port}"))
    assert '"model":"/drafts/{port}"' in matrix.command_of(matrix.variants[1])[-1]


@pytest.mark.parametrize(
    ("old", "new", "line", "what", "fix"),
    [
        ("engine: vllm", "engine: vlm", 2, "engine: expected one of", "did you mean 'vllm'?"),
        ("port: 8123", "prot: 8123", 10, "prot: unknown key", "did you mean 'port'?"),
        ("max_new_tokens: 64\n", "", 1, "max_new_tokens: missing key", "add 'max_new_tokens:'"),
        ("max_new_tokens: 64", "max_new_tokens: 0", 5, "expected 1 to 1,000,000, got 0", "number"),
        ("port: 8123", "port: 70000", 10, "port: expected 1 to 65,535, got 70,000", "number"),
        ("[1, 4]", "[1, 0]", 11, "concurrencies: expected 1 to 100,000, got 0", "number"),
        ("[1, 4]", "[4, 1, 4]", 11, "concurrencies: 4 stands twice", "keep one"),
        ("[1, 4]", "[]", 11, "concurrencies: empty list", "fill the list"),
        ("port: 8123", "num_top_logprobs: 21", 10, "num_top_logprobs: expected 0 to 20", "number"),
        ("port: 8123", "temperature: hot", 10, "temperature: expected a number", "a number"),
        ("port: 8123", "temperature: -1", 10, "temperature: expected at least 0", "greedy"),
        ("port: 8123", "temperature: .inf", 10, "temperature: expected at least 0", "greedy"),
        ("port: 8123", "top_p: 0.5", 1, "decoding is greedy", "above 0"),
        ("port: 8123", "repeats: 0", 10, "repeats: expected 1", "number"),
        ("port: 8123", "host: a b", 10, "host: expected a name", "127.0.0.1"),
        ('A: "1"', "A: 1", 9, "environment.A: expected text, got '1'", 'quote it: "1"'),
        ('A: "1"', '"A=": "1"', 9, "'A=' cannot be an environment variable", "letters"),
        ('B: "3"', '"3": "3"', 17, "variants[1].environment: '3' cannot be", "letters"),
        ("name: none", "name: bf16", 14, "variants[1].name: 'bf16' stands twice", "once"),
        ("name: none", "name: ../x", 13, "variants[0].name: '../x' cannot be", "letters"),
        ("--host {host}", "--host {hots}", 6, "command: {hots} stands for nothing", "'host'"),
        ("--host {host}", "--host '", 6, "command: cannot be split", "close the quotes"),
        ('"{draft}"', '"x"', 14, "variants[1]: its draft is nowhere in its command", "{draft}"),
        ("name: none", "name: none\n    arguments: -d {draft}", 14, "variant has none", "draft:"),
        ("--host {host}", "--d {draft}", 13, "has no draft, and the command names", "a draft"),
        ("name: none", "name: none\n    served_as: /d", 13, "served_as: is given, but", "draft:"),
        ("name: none", "name: none\n  - name: too", 13, "more than one has no draft", "a draft"),
    ],
)  # fmt: skip
def test_every_problem_has_its_line(
    tmp_path: Path, old: str, new: str, line: int, what: str, fix: str
) -> None:
    first, *_ = problems(tmp_path, old, new)
    assert first[0] == line
    assert what in first[1]
    assert fix in first[2]


def test_an_empty_command_and_several_problems_at_once(tmp_path: Path) -> None:
    text = WHOLE.replace("port: 8123", "port: 0").replace("[1, 4]", "[0]")
    begin, end = text.index("command:"), text.index("environment: {A")
    with pytest.raises(RecipeFileError) as caught:
        load(tmp_path, text[:begin] + 'command: ""\n' + text[end:])
    found = [problem.what for problem in caught.value.problems]
    assert found[0] == "command: is empty"
    assert [what.partition(":")[0] for what in found] == ["command", "port", "concurrencies"]


def test_what_is_no_matrix(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="give a readable matrix file"):
        load_matrix(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match=r"matrix\.yaml:1: expected a mapping of matrix keys"):
        load(tmp_path, "- a\n")
    with pytest.raises(RecipeError, match=r"matrix\.yaml:1: anchors and aliases"):
        load(tmp_path, "a: &b c\n")
