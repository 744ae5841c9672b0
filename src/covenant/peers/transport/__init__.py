"""The transport of sealed messages: inbox, outbox, long polling, and the HTTP client under them."""
