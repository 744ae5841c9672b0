"""The operations of the mailbox and of operators. A module a noun holds the requests, the answers and the code."""
