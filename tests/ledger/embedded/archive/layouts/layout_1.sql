-- The archive: what the journal says, laid out for questions. A projection: it holds nothing that the journal did
-- not say first, and as long as the journal's segments are kept it can be made again from them.
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

-- One row a task, written again whenever the task moves. The request, which may be large and never changes, is
-- therefore in a table of its own.
CREATE TABLE a2a_tasks (
    task_no INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL UNIQUE,
    tenant_id TEXT NOT NULL,
    agent_id TEXT NOT NULL, -- the local part of the recipient's display
    context_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    ledger_state TEXT NOT NULL,
    digest TEXT NOT NULL,
    sender_display TEXT NOT NULL,
    sender_pubkey TEXT NOT NULL,
    recipient_display TEXT NOT NULL,
    recipient_pubkey TEXT NOT NULL,
    parent TEXT,
    task_kind TEXT,
    deadline_ms INTEGER,
    origin TEXT NOT NULL,
    place INTEGER NOT NULL, -- where it was last queued
    settled_place INTEGER, -- where it ended; null while it is live
    generation INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    interrupted INTEGER NOT NULL,
    interruption TEXT,
    lease_id TEXT, -- the live lease while in flight; afterwards the last one of this turn
    leased_to_display TEXT,
    leased_to_pubkey TEXT,
    leased_at_ms INTEGER,
    renewed_at_ms INTEGER,
    node TEXT,
    boot TEXT,
    ending TEXT,
    cause TEXT,
    result TEXT,
    touched_at_ms INTEGER GENERATED ALWAYS AS (max(leased_at_ms, renewed_at_ms)) VIRTUAL,
    state TEXT GENERATED ALWAYS AS ( -- in A2A's words
        CASE
            WHEN ending IS NOT NULL THEN ending
            WHEN ledger_state = 'parked' THEN interruption
            WHEN attempt > 0 OR turn > 1 THEN 'working'
            ELSE 'submitted'
        END
    ) VIRTUAL,
    final_message_json TEXT GENERATED ALWAYS AS (coalesce(result, '')) VIRTUAL,
    error_message TEXT GENERATED ALWAYS AS (coalesce(json_extract(result, '$.error_message'), '')) VIRTUAL
);

-- Partial, so that finished tasks neither fill these nor slow them. `settled_place IS NULL` means live.
CREATE INDEX live ON a2a_tasks (ledger_state, place) WHERE settled_place IS NULL;
CREATE INDEX live_by_recipient ON a2a_tasks (recipient_pubkey, ledger_state, place)
WHERE settled_place IS NULL;
CREATE INDEX live_by_sender ON a2a_tasks (sender_pubkey, ledger_state, place)
WHERE settled_place IS NULL;
CREATE INDEX live_by_lessee ON a2a_tasks (leased_to_pubkey, ledger_state, place)
WHERE settled_place IS NULL AND leased_to_pubkey IS NOT NULL;
CREATE INDEX pending ON a2a_tasks (settled_place) WHERE ledger_state = 'result_pending';
CREATE INDEX pending_by_sender ON a2a_tasks (sender_pubkey, settled_place)
WHERE ledger_state = 'result_pending';
CREATE INDEX finished ON a2a_tasks (settled_place) WHERE settled_place IS NOT NULL;
CREATE INDEX children ON a2a_tasks (parent) WHERE parent IS NOT NULL;

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

-- Who had a task in hand, and how each lease ended: as it was said, and paired by its order when somebody asks. Not
-- keyed by lease: those ids are random, and each would touch a page of its own.
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

CREATE INDEX by_update ON a2a_tasks (updated_at);

PRAGMA user_version = 1;
