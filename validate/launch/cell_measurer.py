"""`CellMeasurer`: measures the cells of a matrix, each while its server runs.

It knows neither how servers are started nor what their figures come to.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from ...calibration.prompts.prompt_file import PromptEncoder, read_prompts
from ...calibration.server_client import ServerClient
from ...calibration.traces.prompt_trace import prompt_sha256
from ..errors import MeasureError
from ..measure import protocols
from ..measure.measure_plan import Plan, ServerAddress
from ..measure.measurement_checks import prompts_sha256
from ..measure.measurement_file import read_measurement
from ..measure.measuring import Progress, measure
from ..measure.protocols.protocol import Ask
from ..measure.served_draft import DraftIdentity
from .launch import Cell, Folder, cells
from .matrix import Matrix, Variant
from .speed import Run

ONE_AT_A_TIME = {"vllm": "add --per-request-spec-decode-metrics summary to the variant's arguments"}


class CellMeasurer:
    """Measures the servers of a matrix.

    Args:
        matrix: what is wanted.
        server: where they listen, one after the other.
        drafts: variant -> the draft that its server runs; none for one that drafts nothing.
    """

    def __init__(
        self, matrix: Matrix, server: ServerAddress, drafts: Mapping[str, DraftIdentity]
    ) -> None:
        target = Path(matrix.target)
        self._encoder = PromptEncoder(target if target.is_dir() else None)
        self.prompts = read_prompts(Path(matrix.prompts), encoder=self._encoder)
        self._matrix, self._server, self._drafts = matrix, server, drafts
        self._prompts_sha256 = prompts_sha256(
            (prompt.id, prompt.category, prompt_sha256(prompt.token_ids)) for prompt in self.prompts
        )

    def identity(self) -> dict[str, object]:
        """What a folder's measurements belong to beside the matrix: what its names stand for."""
        drafts = {name: draft.draft_sha256 for name, draft in self._drafts.items()}
        return {"prompts_sha256": self._prompts_sha256, "drafts_sha256": drafts}

    async def first_answer(self, variant: Variant) -> None:
        """Get the server's first answer, and see that it can be measured at all."""
        server, plan = self._server, self._plan(1, variant)
        protocol = protocols.get_protocol(self._matrix.engine)
        async with ServerClient(
            server.url, key=server.key, most_in_flight=1, patience=server.patience
        ) as client:
            setup = plan.setup(protocol, *await protocol.identify(client))
            if setup.speculation is not None and variant.draft is None:
                raise MeasureError(variant.name, "has no draft, but its server uses one",
                                   fix="correct the variant's arguments")  # fmt: skip
            most = protocol.most_in_flight
            if most is not None and most < max(self._matrix.concurrencies):
                raise MeasureError(
                    variant.name,
                    f"only {most} request(s) at a time can be told apart",
                    fix=ONE_AT_A_TIME.get(self._matrix.engine, "see 'concurrencies:'"),
                )
            await protocol.complete(client, plan.prompts[0], plan.ask)

    def measure(self, cell: Cell, out: Path, on_progress: Callable[[Progress], None]) -> None:
        """Measure one cell."""
        plan = self._plan(cell.concurrency, cell.variant)
        protocol = protocols.get_protocol(self._matrix.engine)
        measure(out, self._server, protocol, plan, on_progress=on_progress)

    def _plan(self, concurrency: int, variant: Variant) -> Plan:
        return Plan(
            prompts=self.prompts,
            ask=Ask(
                decoding=self._matrix.decoding,
                max_new_tokens=self._matrix.max_new_tokens,
                ignore_eos=self._matrix.ignore_eos,
            ),
            concurrency=concurrency,
            num_warm_up=self._matrix.num_warm_up,
            template_sha256=self._encoder.template_sha256,
            draft=self._drafts.get(variant.name),
        )


def measured_runs(matrix: Matrix, folder: Folder) -> list[Run]:
    """What was measured of every cell, which is compared by speed."""
    return [
        Run(
            variant=cell.variant.name,
            drafts=cell.variant.draft is not None,
            concurrency=cell.concurrency,
            repeat=cell.repeat,
            measurement=read_measurement(folder.measurement(cell)),
        )
        for cell in cells(matrix)
    ]
