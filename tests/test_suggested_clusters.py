"""Groups that ids or categories suggest, and names that suggest none."""

from draftquant.calibration.traces.near_duplicates import suggested_clusters

SUGGESTING = {
    "documents": ([(f"doc{d}-{i}", "all") for d in range(8) for i in range(5)], "8 groups (doc0, "),
    "tasks": ([(f"task{t}/{i}", "few-shot") for t in "abc" for i in range(10)], "3 groups (taska"),
    "categories": ([(f"p{i}", f"user {i // 4}") for i in range(40)], "10 groups (user 0, user 1"),
}
SILENT = {
    "numbers": [(f"q-{i}", "all") for i in range(40)],
    "a category each": [(f"{c}/{i}", c) for c in ("math", "code", "chat") for i in range(10)],
    "a name each": [(f"n{i}-x", "all") for i in range(40)],
    "two": [(f"{name}-{i}", "all") for name in "ab" for i in range(10)],
    "one of each": [(f"doc{d}-1", "all") for d in range(20)],
    "turns": [(f"{n}/turn-{t}", "all") for n in range(8) for t in (1, 2)],
    "levels": [(f"p{i}", f"level {i % 2}") for i in range(40)],
    "nothing": [],
}


def test_names_that_suggest_groups() -> None:
    for prompts, expected in SUGGESTING.values():
        assert expected in suggested_clusters(prompts)
        assert 'declare it as "cluster"' in suggested_clusters(prompts)


def test_names_that_suggest_nothing() -> None:
    for name, prompts in SILENT.items():
        assert suggested_clusters(prompts) == "", name
