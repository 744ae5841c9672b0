"""FairScheduler: each tenant and each host in its place, whoever else waits."""

from covenant.outbound.concurrency import FairScheduler


def drawn(turns: FairScheduler[str]) -> list[str]:
    found = []
    while (call := turns.next()) is not None:
        found.append(call)
    return found


def test_tenants_take_turns_and_so_do_their_hosts() -> None:
    turns: FairScheduler[str] = FairScheduler(at_once=100, per_tenant=100, per_host=100)
    for number in range(3):
        for host in ("x", "y"):
            turns.wait("a", host, f"a-{host}{number}")
    turns.wait("b", "x", "b-x0")
    assert drawn(turns) == ["a-x0", "b-x0", "a-y0", "a-x1", "a-y1", "a-x2", "a-y2"]


def test_no_host_tenant_or_all_together_have_more_than_their_places() -> None:
    turns: FairScheduler[str] = FairScheduler(at_once=4, per_tenant=3, per_host=2)
    for number in range(9):
        turns.wait("a", "x", f"x{number}")
    assert drawn(turns) == ["x0", "x1"]
    for number in range(9):
        turns.wait("a", "y", f"y{number}")
    assert drawn(turns) == ["y0"]
    for number in range(9):
        turns.wait("b", "x", f"b{number}")
    assert drawn(turns) == ["b0"]
    turns.done("a", "x")
    assert drawn(turns) == ["b1"], "the place is for whoever has waited longest"
    turns.done("b", "x")
    assert drawn(turns) == ["y1"]


def test_what_is_done_leaves_nothing_behind() -> None:
    turns: FairScheduler[int] = FairScheduler(at_once=10, per_tenant=5, per_host=2)
    for number in range(1_000):
        turns.wait(f"tenant {number % 7}", f"host {number % 13}", number)
    seen = set()
    under_way: list[int] = []
    while True:
        while (call := turns.next()) is not None:
            under_way.append(call)
        if not under_way:
            break
        number = under_way.pop(0)
        seen.add(number)
        turns.done(f"tenant {number % 7}", f"host {number % 13}")
    assert seen == set(range(1_000))
    assert (turns.under_way, turns._tenants, turns._ready) == (0, {}, {})
