"""The mailbox over the socket in the home: length-prefixed JSON frames, one request after the other."""
