INSERT INTO ids_new VALUES {rows}
