"""Shipped for engine authors: contract suites, a fake clock, a fault injector."""
