"""The demo: its first draft loads in both engines, and each verdict comes once."""

from draftquant.quantize.drafts import read_draft
from draftquant.quantize.engines.plan_verdicts import planned_verdicts
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.scripts.dev.demo import PAIR, RECIPES
from draftquant.scripts.dev.docs.acceptance import measured_changes


def test_every_draft_of_the_demo_loads_somewhere_and_the_first_in_both_engines() -> None:
    draft = read_draft(Checkpoint.open(PAIR / "draft"))
    loading = {}
    for name, recipe in RECIPES.items():
        verdicts = planned_verdicts(make_plan(load_recipe(recipe), draft), fix_config=True)
        loading[name] = {one.engine for one in verdicts if one.verdict == "LOADS"}
    assert all(loading.values())
    assert loading[next(iter(RECIPES))] == {"vllm", "sglang"}


def test_the_demo_shows_each_verdict() -> None:
    measured = measured_changes()
    verdicts = [measured[recipe][PAIR.name].verdict for recipe in RECIPES.values()]
    assert verdicts == ["PASS", "INCONCLUSIVE", "FAIL"]
