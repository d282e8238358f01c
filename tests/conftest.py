"""Which back-ends the tests run on, and hypothesis profiles.

The same bodies run on the CPU and, where there is a GPU, on every back-end of this build that has
the kernels a test needs. The registry decides that, never an exception. Without a GPU the GPU runs
are skipped, and the summary says how many.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import neginf
from ranks import TWO_GPUS, Ranks
from targets import FEW_GPUS, NO_GPU, TARGETS_KEY, targets

COMMON = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("default", max_examples=60, **COMMON)
settings.register_profile("thorough", max_examples=1000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config):
    config.addinivalue_line(
        "markers", f"{TARGETS_KEY}(*operations, dtypes): run on each back-end that has them"
    )


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker(TARGETS_KEY)
    if marker is not None:
        metafunc.parametrize("target", targets(*marker.args, **marker.kwargs), indirect=True)


@pytest.fixture
def target(request):
    """A (device, arch, dtype) with the back-end forced for the test's time."""
    with neginf.backend(request.param.forced_backend):
        yield request.param


@pytest.fixture(
    scope="module",
    params=[("cpu", 1), ("cpu", 2), ("cpu", 3), TWO_GPUS],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def ranks(request, tmp_path_factory):
    """So many processes, the ranks of one group. Started once for a module."""
    device, size = request.param
    ranks = Ranks(size, tmp_path_factory.mktemp("store") / "store", device)
    ranks.device = device
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    for reason in (NO_GPU, FEW_GPUS):
        count = sum(reason in str(report.longrepr) for report in skipped)
        if count:
            terminalreporter.write_line(f"{count} GPU tests skipped: {reason}")
