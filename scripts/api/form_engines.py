"""Which engines serve each form of an estimated draft, on each GPU: by `check`, and by loading."""

from collections.abc import Iterable, Mapping, Sequence

from ...quantize.engines.preview import planned_verdicts, verdicts_of
from ...quantize.engines.vllm.online_head import online_head_problem
from ...quantize.estimate.estimate_report import Serving
from ...quantize.estimate.forms import Form
from ...quantize.estimate.step_estimate import Estimate
from ...quantize.gpus import Gpu


def engines_of_forms(
    estimate: Estimate, gpus: Iterable[Gpu]
) -> Mapping[str, Mapping[str, Serving]]:
    """Name of a form -> GPU -> who serves it; not of the draft as it is, which is not asked."""
    on = tuple(gpus)
    return {
        one.name: {gpu.name: _serving(one.form, gpu, estimate.tp) for gpu in on}
        for one in estimate.candidates
        if one is not estimate.baseline
    }


def _serving(form: Form, gpu: Gpu, tp: int) -> Serving:
    loaded = _loading(form, gpu, tp)
    if form.head is None:
        return Serving(folder=loaded)
    problem = online_head_problem(form.draft, form.head, gpu)
    if problem is None and "vllm" not in _loading(form.without_head(), gpu, tp):
        problem = f"vLLM 0.33 does not load {form.without_head().name} on {gpu.name}"
    return Serving(folder=loaded, online=problem is None, online_problem=problem)


def _loading(form: Form, gpu: Gpu, tp: int) -> Sequence[str]:
    """Those that load a folder in this form; none where nothing writes one."""
    plan = form.in_folder()
    if plan is not None:
        layers = plan.target_layers
        verdicts = planned_verdicts(plan, arch=gpu.arch, tp=tp, target_layers=layers)
    elif form.head is None:
        verdicts = verdicts_of(form.draft.checkpoint, arch=gpu.arch, tp=tp)
    else:
        verdicts = ()
    return tuple(one.engine for one in verdicts if one.verdict == "LOADS")
