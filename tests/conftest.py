"""Settings of all tests: offline, few threads, one seed, and the combinations that only `--full` runs."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, as transformers does

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `full` too (make test-all)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="runs with --full (make test-all)"))


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def spare_the_collector() -> None:
    """What is there before a file's tests stays: a `gc.collect()` in them need not walk torch and transformers anew."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def set_seed() -> None:
    """Every test starts from the same state of torch's generator."""
    torch.manual_seed(0)
