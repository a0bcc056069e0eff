"""Every carrier, plain and wrapped, satisfies every law of carriers."""

from __future__ import annotations

import pytest
from group_laws import CASES, TIMEOUT, all_laws, run_case, run_processes
from pieces import over
from secure_groups import run_secure

from thinwire.comm import run_threads
from thinwire.net import Hub


@over("case", CASES)
def test_thread_groups_satisfy_every_carrier_law(case):
    run_threads(int(case[-1]), lambda group: run_case(case, group), TIMEOUT)


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    """The failures of all cases on each of four processes, which run once."""
    return run_processes(all_laws, 4, tmp_path_factory.mktemp("gloo"))


@over("case", CASES)
def test_gloo_groups_satisfy_every_carrier_law(case, gloo):
    assert None not in gloo, "a process died or hung"
    failures = [failures[case] for failures in gloo if case in failures]
    assert not failures, "\n".join(failures)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    hub = Hub(tmp_path_factory.mktemp("hub"))
    yield hub
    hub.close()


BARE = [case for case in CASES if "-bare-" in case]  # a wrapper does not ask what carries


@over("case", [case for case in BARE if not case.endswith("-3")])
def test_secure_groups_satisfy_every_carrier_law(case, hub, tmp_path):
    """Each replica is a thread with its own key and TLS connections."""
    run_secure(hub, int(case[-1]), lambda group: run_case(case, group), tmp_path)


@pytest.mark.slow
@over("case", [case for case in BARE if case.endswith("-3")])
def test_secure_groups_of_three_satisfy_every_carrier_law(case, hub, tmp_path):
    run_secure(hub, 3, lambda group: run_case(case, group), tmp_path)
