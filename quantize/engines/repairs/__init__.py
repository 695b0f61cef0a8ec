"""Repairing what is wrong with the JSON of a draft folder, into a new folder.

Tensors are never changed. What engines need and the JSON does not say is taken from the tensors, or
proven against the source; what neither tells is left as it is, and said.
"""

from .repair import Repair
from .repair_plan import RepairPlan, plan_repairs
from .repaired_copy import RepairReport, repair_draft

__all__ = ["Repair", "RepairPlan", "RepairReport", "plan_repairs", "repair_draft"]
