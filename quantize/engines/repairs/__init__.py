"""Repairing the JSON of a draft folder, into a new folder.

Tensors are never changed. If the JSON lacks a fact that engines need, it is taken from the tensors
or proven against the source. What neither can show stays as it is, and is reported.
"""

from typing import TYPE_CHECKING

from ....recipes.lazy_names import lazy_names

if TYPE_CHECKING:
    from .repair import Repair as Repair
    from .repair_plan import RepairPlan as RepairPlan
    from .repair_plan import plan_repairs as plan_repairs
    from .repaired_copy import RepairReport as RepairReport
    from .repaired_copy import repair_draft as repair_draft

_HOMES = {
    "Repair": ".repair",
    "RepairPlan": ".repair_plan",
    "RepairReport": ".repaired_copy",
    "plan_repairs": ".repair_plan",
    "repair_draft": ".repaired_copy",
}
__all__ = [*_HOMES]
__getattr__ = lazy_names(__name__, _HOMES)
