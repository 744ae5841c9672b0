"""HTTP/1.1 over asyncio and httptools' parser: every bound in one table, and one declared interface to the doors."""
