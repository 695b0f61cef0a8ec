"""`replay`, whole: opens drafts and traces, counts, and writes golden acceptance."""

import dataclasses

from ...calibration.passes.on_traces import open_with_warnings
from ...quantize.files.hub import folder_of
from ..counting.draft_counts import DraftReplay
from ..counting.loaded_drafts import load_for_replay
from ..counting.position_limits import position_warnings
from ..counting.replaying import replay_loaded
from ..golden.golden_sources import golden_of_replay
from .asked import ReplayRun
from .report_pages import check_golden, draft_identity, write_golden


def replay_asked(asked: ReplayRun) -> tuple[DraftReplay, ...]:
    """Replay drafts, and write the golden acceptance of a sole one.

    Raises:
        DraftQuantError: see `replay`.
    """
    check_golden(asked.golden, overwrite=asked.overwrite)
    traces, warnings = open_with_warnings(asked.traces, asked.listener)
    folders = [folder_of(draft) for draft in asked.drafts]
    for warning in warnings + position_warnings(folders, traces, asked.listener):
        asked.listener.warning(warning)
    replays = replay_loaded(load_for_replay(folders, traces, asked), asked)
    if fault := replays[0].traces.features.fault():
        asked.listener.warning(fault)
    if asked.golden is not None:
        own = draft_identity(asked.drafts[0])
        named = dataclasses.replace(replays[0], name=own.draft)
        golden = golden_of_replay(named, draft_sha256=own.draft_sha256)
        write_golden(asked.golden, golden, overwrite=asked.overwrite)
    return replays
