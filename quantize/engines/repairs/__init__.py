"""Repairing the JSON of a draft folder, into a new folder.

Tensors are never changed. If the JSON lacks a fact that engines need, it is taken from the tensors
or proven against the source. What neither can show stays as it is, and is reported.
"""

from .repair import Repair
from .repair_plan import RepairPlan, plan_repairs
from .repaired_copy import RepairReport, repair_draft

__all__ = ["Repair", "RepairPlan", "RepairReport", "plan_repairs", "repair_draft"]
