"""Which peers are known, their keys, and the handshake that verifies them."""
