"""The stored form of a task: it keeps every field of an entry."""

from covenant.ledger.machine.entry import Entry
from covenant.ledger.postgres.stored_task import StoredEntry

ELSEWHERE = {"task", "state", "result", "body_on_disk"}
"""The fields that have columns or rows of their own, or follow from the form."""


def test_an_entry_is_stored_with_all_of_its_fields_in_their_order() -> None:
    kept = [name for name in Entry.__struct_fields__ if name not in ELSEWHERE]
    assert list(StoredEntry.__struct_fields__) == kept
