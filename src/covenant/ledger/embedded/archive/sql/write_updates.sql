-- Places and generations are the journal's: an existing row is a leftover, and is replaced.
INSERT OR REPLACE INTO updates VALUES {rows}
