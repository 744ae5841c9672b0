"""The ledger on PostgreSQL: many daemons, one ledger. Only this package imports the driver.

    engine ──► batch_writer ──► working_set (decide) ──► loader, batch_rows ──► one transaction
       │             └──► news, counters ──► whoever waits, here and on other nodes
       └──► history, audit_log: questions about the past

Everything is used on the loop it was made on.
"""
