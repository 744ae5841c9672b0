-- A row that was there already was not ours: the journal's word replaces it.
INSERT OR REPLACE INTO audit VALUES {rows}
