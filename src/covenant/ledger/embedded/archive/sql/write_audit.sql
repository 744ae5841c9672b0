-- An existing row was not written by us: the journal's row replaces it.
INSERT OR REPLACE INTO audit VALUES {rows}
