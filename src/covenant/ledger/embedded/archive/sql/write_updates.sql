-- Places and generations are the journal's: what stands there already was left over, and gives way.
INSERT OR REPLACE INTO updates VALUES {rows}
