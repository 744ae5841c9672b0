"""Delegation between instances: sealed messages, signed results, and who may ask whom for what."""
