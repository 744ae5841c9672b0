"""Moves a whole ledger between a home and a database, in either direction.

A ledger is read in one form from either of them: the live state, a record of each task with all of its history, the
audit, and the blobs. The written ledger is read back in that form and compared before the move is reported as done.
"""
