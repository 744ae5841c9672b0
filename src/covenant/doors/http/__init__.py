"""The mailbox over HTTP. Every route is a plain ASGI callable; the router only finds it."""
