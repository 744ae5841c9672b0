INSERT INTO handovers VALUES {rows}
