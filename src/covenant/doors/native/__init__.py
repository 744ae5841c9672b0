"""Covenant's own routes for tenants, under `/v1`."""
