"""What each account has in the ledger: how many tasks that have not ended, how many bytes are in them, and in results.

Running totals, changed with the tasks themselves and never counted anew: asking costs a look-up.
"""

from __future__ import annotations

from typing import Final

from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.view import Account
from covenant.model.ids import PublicKey
from covenant.model.task import account_of

_NOTHING: Final = Account()


class Accounts:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._undrained: dict[PublicKey, int] = {}
        """The bytes of results that wait, by sender."""

    def begin(self, entry: Entry) -> None:
        name = account_of(entry.task)
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account()
        account.tasks += 1
        account.size += entry.body_bytes  # nobody has said anything to it yet, unless it comes from a snapshot
        if entry.messages_bytes or entry.kept_bytes:
            account.size += entry.messages_bytes + entry.kept_bytes

    def end(self, entry: Entry) -> None:
        """`entry` as it was before it ended."""
        name = account_of(entry.task)
        account = self._accounts[name]
        account.tasks -= 1
        account.size -= entry.queued_bytes
        if not account.tasks:
            assert not account.size, f"the account {name} has no task, and {account.size} bytes"
            del self._accounts[name]

    def resize(self, before: Entry, after: Entry) -> None:
        """Messages to a live task came or went."""
        self._accounts[account_of(after.task)].size += after.queued_bytes - before.queued_bytes

    def get(self, name: str) -> Account:
        """For reading."""
        return self._accounts.get(name, _NOTHING)

    def settled(self, entry: Entry) -> None:
        """Its result waits for its sender."""
        sender = entry.task.sender.pubkey
        self._undrained[sender] = self._undrained.get(sender, 0) + entry.result_bytes

    def drained(self, entry: Entry) -> None:
        sender = entry.task.sender.pubkey
        left = self._undrained.get(sender, 0) - entry.result_bytes
        if left:
            self._undrained[sender] = left
        else:
            self._undrained.pop(sender, None)

    def undrained(self, sender: PublicKey) -> int:
        return self._undrained.get(sender, 0)
