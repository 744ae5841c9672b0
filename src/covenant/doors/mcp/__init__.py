"""MCP: the exchange as tools that any MCP client can call."""
