"""Other instances: finding them, and delegating to them."""
