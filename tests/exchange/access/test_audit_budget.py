"""What strangers cost in the audit: a row a window for each, and so many for all of them together."""

from covenant.exchange.access.principals import SOURCES_MAX, STRANGERS_MAX, WINDOW_MS, AuditBudget


def test_one_source_costs_a_row_a_window_which_says_what_was_left_out() -> None:
    budget = AuditBudget()
    assert [budget.spend("a", at, stranger=True) for at in (0, 1, 2, WINDOW_MS)] == [0, None, None, 2]


def test_what_was_left_out_and_is_in_no_row_yet_is_known_for_a_while() -> None:
    budget = AuditBudget()
    for at, source in ((0, "a"), (1, "a"), (2, "a"), (3, "b")):
        budget.spend(source, at, stranger=True)
    assert (budget.unreported(4, 1_000), budget.unreported(1_000, 1_000)) == (2, 0)
    budget.spend("a", WINDOW_MS, stranger=True)
    assert budget.unreported(WINDOW_MS, 2 * WINDOW_MS) == 0, "a row has told of them"


def test_all_sources_together_cost_a_bounded_number_of_rows() -> None:
    budget = AuditBudget()
    rows = [budget.spend(f"address {n}", 5, stranger=True) for n in range(50_000)]
    assert sum(row is not None for row in rows) == STRANGERS_MAX
    assert budget.spend("another", 5 + WINDOW_MS, stranger=True) == 50_000 - STRANGERS_MAX


def test_whom_we_know_is_told_of_however_many_strangers_there_are_and_memory_is_bounded() -> None:
    budget = AuditBudget()
    for number in range(STRANGERS_MAX + 1):
        budget.spend(number, 0, stranger=True)
    assert budget.spend(("peer", "fault"), 0, stranger=False) == 0
    for number in range(SOURCES_MAX * 3):
        budget.spend(("peer", number), 0, stranger=False)
    assert len(budget._sources) <= SOURCES_MAX


def test_a_clock_that_went_back_starts_a_new_window() -> None:
    budget = AuditBudget()
    assert [budget.spend("a", at, stranger=True) for at in (WINDOW_MS * 9, 0, 1)] == [0, 0, None]
