"""`covenant prove`: a kit that shows which promises an A2A server keeps when it is killed.

The kit starts the server under test by a command, speaks A2A to it as any client does, kills it, starts it again and
compares the server's answers before and after. It imports no other package of Covenant.
"""
