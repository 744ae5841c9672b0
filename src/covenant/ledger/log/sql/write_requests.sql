INSERT INTO requests VALUES {rows}
