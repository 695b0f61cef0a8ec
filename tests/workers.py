"""`pytest --workers N`: collect once, and run the tests in N forks of that process.

A fork shares what collecting has imported and compiled. It takes one file of tests at a time, the
longest first (everyday.py), so that all forks end together, and sends each report to the first
process, which counts and prints it as if it had run the test.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest

FORK = multiprocessing.get_context("fork")
Numbers = SimpleQueue[int | None]
"""Which file of tests comes next; None ends a fork."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--workers N`."""
    parser.addoption("--workers", type=int, default=1, metavar="N", help="run in N processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In place of pytest's own loop where more than one worker is asked for."""
    config = session.config
    workers: int = config.getoption("--workers")
    if workers < 2 or session.testsfailed or config.option.collectonly:
        return None
    if config.getoption("--cpu-seconds", default=None) is not None:
        raise pytest.UsageError("--cpu-seconds counts what one process does: drop --workers")
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    numbers: Numbers = FORK.SimpleQueue()
    for number in chain(range(len(files)), [None] * workers):
        numbers.put(number)
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    temporary = factory.getbasetemp()
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # forks of one capture would write into one file
    receiving, forks = [], []
    for worker in range(workers):
        receiver, sender = FORK.Pipe(duplex=False)
        given = (session, files, numbers, sender, temporary / f"worker{worker}")
        fork = FORK.Process(target=run_files, args=given)
        fork.start()
        sender.close()  # the fork has it: its end is the end of the reports
        receiving.append(receiver)
        forks.append(fork)
    capture.start_global_capturing()
    try:
        log_reports(session, receiving)
    except BaseException:
        for fork in forks:
            fork.terminate()
        raise
    for fork in forks:
        fork.join()
        if fork.exitcode:
            session.shouldfail = f"a worker ended with {fork.exitcode}: its last tests are missing"
            raise session.Failed(session.shouldfail)
    return True


def run_files(
    session: pytest.Session,
    files: Sequence[Sequence[pytest.Item]],
    numbers: Numbers,
    sender: Connection,
    temporary: Path,
) -> None:
    """A fork: run the files whose numbers it gets, and send each report as it comes."""
    config = session.config
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(Sender(config, sender))
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.start_global_capturing()
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._given_basetemp, factory._basetemp = temporary, None
    for item, following in pairwise(chain(items_of(files, numbers), [None])):
        assert item is not None
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break


def items_of(files: Sequence[Sequence[pytest.Item]], numbers: Numbers) -> Iterator[pytest.Item]:
    """The tests of one file after the other, as long as there are files."""
    while (number := numbers.get()) is not None:
        yield from files[number]


class Sender:
    """What a fork has in place of a terminal."""

    def __init__(self, config: pytest.Config, sender: Connection) -> None:
        self._config, self._sender = config, sender

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send it in the form that pytest gives to reports between processes."""
        hook = self._config.hook
        self._sender.send(hook.pytest_report_to_serializable(config=self._config, report=report))


def log_reports(session: pytest.Session, receiving: list[Connection]) -> None:
    """Hand on each report until all forks have closed their ends.

    Raises:
        pytest.Session.Failed: as many tests failed as `--maxfail` admits.
    """
    hook = session.config.hook
    while receiving:
        for receiver in wait(receiving):
            assert isinstance(receiver, Connection)
            try:
                data: dict[str, Any] = receiver.recv()
            except EOFError:
                receiving.remove(receiver)
                continue
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
