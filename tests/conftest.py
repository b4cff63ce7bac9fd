"""Settings of all tests: offline, one thread, one seed, what they may cost, and what only `--full` runs."""

import gc
import os
import signal
import zlib
from collections.abc import Generator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models leave a second thread nothing to do; for started processes, too

import pytest
import quick_interpreter
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, as transformers does
    quick_interpreter.install()
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell has started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

BUDGET = 17 * 60  # seconds of processor time for all tests without `--full`; above it the dearest are named
BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all tests, and all cases of each (make test-all)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    first: set[str] = set()
    runs = [(item, _runs(item, first)) for item in items]
    config.hook.pytest_deselected(items=[item for item, yes in runs if not yes])
    items[:] = [item for item, yes in runs if yes]


def _runs(item: pytest.Item, first: set[str]) -> bool:
    """Without `--full`: not what is marked `full`; of a test marked `every(n)` the first case, and one in n others,
    spread over all of its parameters by their names."""
    if item.get_closest_marker("full"):
        return False
    every, name = item.get_closest_marker("every"), item.nodeid.partition("[")[0]
    if every is None or name not in first:
        first.add(name)
        return True
    return zlib.crc32(item.nodeid.encode()) % every.args[0] == 0


def spent() -> float:
    """Seconds of processor time so far, those of started processes that have ended included."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[BEGAN] = spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.cost = spent() - item.stash[BEGAN]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    costs = {r.nodeid: r.cost for some in terminalreporter.stats.values() for r in some if hasattr(r, "cost")}
    whole = sum(costs.values())
    terminalreporter.write_line(f"{whole:.0f} s of processor time in tests; at most {BUDGET} are to be needed")
    if whole > BUDGET and not config.getoption("--full"):
        for name in sorted(costs, key=costs.__getitem__, reverse=True)[:20]:
            terminalreporter.write_line(f"{costs[name]:6.1f} s  {name}")


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def spare_the_collector() -> None:
    """What is there before a file's tests stays: a `gc.collect()` in them need not walk torch and transformers anew."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def untimed() -> None:
    """No drafter is turned off by the clock unless a test says `auto=True`."""
    from mmspec.pipelines.patching import drafting

    drafting.SWITCHED = False


@pytest.fixture(autouse=True)
def set_seed() -> None:
    """Every test starts from the same state of torch's generator."""
    torch.manual_seed(0)
