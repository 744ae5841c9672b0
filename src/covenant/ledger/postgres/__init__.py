"""The ledger on PostgreSQL: many daemons, one ledger. Only this package and `ledger.transfer` import the driver.

    postgres_ledger ──► batch_writer ──► batch_state (decide) ──► loader, batch_rows ──► one transaction
    │                   └──► news, counters ──► waiters, here and on other nodes
    └──► task_history, audit_log: reads of the past

Every object is used on the loop that created it.
"""
