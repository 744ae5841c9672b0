"""Keys, tokens, envelopes and proofs: the only importer of a crypto library."""
