-- Records that could not be applied: each with the reason, and the record's line as the journal has it.
CREATE TABLE IF NOT EXISTS rejects (
    seq INTEGER PRIMARY KEY,
    error TEXT NOT NULL,
    line BLOB NOT NULL
);
