"""How sealed messages travel: inbox, outbox, long polling, and the HTTP client under them."""
