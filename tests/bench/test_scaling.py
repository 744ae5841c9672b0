"""The simulation behind docs/scaling.md keeps its own laws: nothing appears or vanishes, and costs add up."""

import pytest

from bench.scaling import Cluster, Fault, Measured, Simulation, costs_of, sustained

COSTS = costs_of(Measured())
THREE = Cluster(3, 4)


def test_the_costs_give_back_what_was_measured() -> None:
    measured = Measured()
    alone_s = 2 * (COSTS.daemon_batch_s + COSTS.daemon_command_s)
    many_s = 2 * (COSTS.daemon_batch_s / measured.batch + COSTS.daemon_command_s)
    assert alone_s == pytest.approx(measured.daemon_alone_s)
    assert many_s == pytest.approx(measured.daemon_many_s)


def test_a_task_alone_takes_the_sum_of_its_costs() -> None:
    found = Simulation(Cluster(1, 1), COSTS, per_s=1.0, seconds=20.0).run()
    cpu_s = Measured().daemon_alone_s + Measured().database_alone_s
    ways_s, syncs_s = 2 * 0.25e-3, 2 * (0.5e-3 + COSTS.wal_bytes / 500e6)
    assert found.p50_ms == pytest.approx((cpu_s + ways_s + syncs_s) * 1e3)


def test_more_daemons_carry_more_until_they_fill_the_log() -> None:
    rates = [sustained(Cluster(daemons, 64), COSTS, 0.2) for daemons in (1, 3, 10, 60)]
    assert rates[0].per_s * 2.5 < rates[1].per_s < rates[2].per_s
    assert rates[3].log_busy > 0.95
    assert rates[3].per_s < 6 * rates[2].per_s * 0.6


@pytest.mark.parametrize("fault", [Fault(0.5, 9.0, daemon=1), Fault(0.5, 4.0)], ids=["a daemon", "the database"])
def test_a_failure_loses_no_task(fault: Fault) -> None:
    cluster = THREE._replace(agent_s=0.2)
    calm = Simulation(cluster, COSTS, 300.0, 6.0).run()
    assert (calm.held, calm.refused) == (0, 0)
    simulation = Simulation(cluster, COSTS, 300.0, 6.0, (fault,))
    found = simulation.run()
    assert found.done + found.held == simulation.came
    assert (found.held > 0) == (fault.daemon is not None)
    assert (found.refused > 0) == (fault.daemon is None)


def test_a_daemon_that_was_killed_gets_nothing_more() -> None:
    """All three are killed in turn, and the last one comes back: whoever waited is served by it."""
    faults = (Fault(0.1, 99.0, 0), Fault(0.1, 99.0, 1), Fault(0.1, 2.0, 2))
    simulation = Simulation(THREE, COSTS, 200.0, 1.0, faults)
    found = simulation.run()
    assert found.done + found.held == simulation.came
    assert found.longest_ms > 1_000
    assert found.refused > 0
