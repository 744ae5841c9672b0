"""Delegation between instances: sealed messages, signed results, and admission of offers."""
