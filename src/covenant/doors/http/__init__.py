"""The HTTP doors. Every route is a plain ASGI callable; the router only finds it."""
