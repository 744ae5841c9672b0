"""Keys, signatures and tokens. The only importer of a crypto library; its randomness comes from there alone; no IO."""
