"""Settings of all tests: offline, few threads, one seed, and the combinations that only `--full` runs."""

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


@pytest.fixture(autouse=True)
def set_seed() -> None:
    """Every test starts from the same state of torch's generator."""
    torch.manual_seed(0)
