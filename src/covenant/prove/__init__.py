"""`covenant prove`: a kit that shows which promises an A2A server keeps when it is killed.

The kit starts the server under test by a command, speaks A2A to it as a stranger does, kills it, starts it again and
compares what was promised with what is there. It needs nothing of Covenant: no other package of ours is imported here.
"""
