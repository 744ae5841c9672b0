-- The archive: the journal's content, arranged for queries. It is a projection: it holds nothing that was not in the
-- journal first, and as long as the journal's segments are kept it can be rebuilt from them.
--
-- A place is the position of an event in the journal: seq * 1048576 + its index in the record. Places order
-- everything, and the place where a task was sent is its number here.

CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value NOT NULL
) WITHOUT ROWID;

INSERT INTO meta VALUES
    ('archived_seq', 0),
    ('audit_anchor_index', 0),
    ('audit_anchor_hash', printf('%064d', 0)),
    ('audit_verified_index', 0),
    ('audit_verified_hash', printf('%064d', 0));

CREATE TABLE requests (
    task_no INTEGER PRIMARY KEY,
    task TEXT NOT NULL
);

-- One row a generation. The body of `submitted` is the task and that of `settled` the result: neither is kept twice.
CREATE TABLE updates (
    task_no INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    kind TEXT NOT NULL,
    ts_ms INTEGER NOT NULL,
    body TEXT,
    PRIMARY KEY (task_no, generation)
) WITHOUT ROWID;

-- Handovers: each lease of a task and its end, as recorded, paired by their order when they are read. Not keyed by
-- lease: those ids are random, and each would touch a page of its own.
CREATE TABLE handovers (
    task_no INTEGER NOT NULL,
    place INTEGER NOT NULL,
    event TEXT NOT NULL, -- leased, released, requeued, parked, continued or settled
    ts_ms INTEGER NOT NULL,
    lease TEXT,
    reason TEXT, -- JSON: extracted as text, it would end at its first NUL
    PRIMARY KEY (task_no, place)
) WITHOUT ROWID;

CREATE TABLE audit (
    idx INTEGER PRIMARY KEY,
    ts_ms INTEGER NOT NULL,
    issuer TEXT NOT NULL,
    chain_hash TEXT NOT NULL,
    row TEXT NOT NULL
);

CREATE INDEX audit_by_issuer ON audit (issuer);
CREATE INDEX audit_by_time ON audit (ts_ms);
