INSERT INTO updates VALUES {rows}
