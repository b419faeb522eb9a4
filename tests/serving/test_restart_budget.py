from math import inf

from rollout_backend.serving.supervisor import RestartBudget


def test_restart_counts_for_the_length_of_the_window():
    now = 0.0
    budget = RestartBudget(2, 60, clock=lambda: now)
    assert budget.wait_s() == 0
    budget.spend()
    now = 10.0
    budget.spend()
    assert budget.wait_s() == 50
    now = 60.0
    assert budget.wait_s() == 0
    budget.spend()
    assert budget.wait_s() == 10


def test_zero_restarts_never_allow_one():
    assert RestartBudget(0, 60).wait_s() == inf
