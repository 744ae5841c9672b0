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
-- One row a task, written again whenever the task moves. The request, which may be large and never changes, is
-- therefore in a table of its own. A task is found by its id through `ids`.
CREATE TABLE a2a_tasks (
    task_no INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    agent_id TEXT NOT NULL, -- the local part of the recipient's display
    context_id TEXT NOT NULL,
    context_no INTEGER, -- what it refers to, as a number; only of tasks that have a context
    parent TEXT,
    parent_no INTEGER,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    ledger_state TEXT NOT NULL,
    state TEXT NOT NULL, -- in A2A's words
    digest TEXT NOT NULL,
    sender_display TEXT NOT NULL,
    sender_pubkey TEXT NOT NULL,
    recipient_display TEXT NOT NULL,
    recipient_pubkey TEXT NOT NULL,
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
    final_message_json TEXT GENERATED ALWAYS AS (coalesce(result, '')) VIRTUAL,
    error_message TEXT GENERATED ALWAYS AS (coalesce(json_extract(result, '$.error_message'), '')) VIRTUAL,
    idempotency_key TEXT
);
-- From a task's id to its number. Ids come in no order: in one large index each would be written to a page of its own,
-- which is read, logged and written back for those few bytes, and a million tasks made each new one cost a third more.
-- So new ids gather in a small table; when that is full, the next part of it, in the order of ids, moves on to a larger
-- one where many of them share each page, and from there to the last. An id is in one of the three.
--
-- So are the names of contexts and parents that were no task's id when they were first mentioned, with the number of the
-- task that did: '@' and '>' before them, as blobs, which come after all ids and equal none.
CREATE TABLE ids_new (
    task_id TEXT PRIMARY KEY,
    task_no INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE ids_recent (
    task_id TEXT PRIMARY KEY,
    task_no INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE ids_old (
    task_id TEXT PRIMARY KEY,
    task_no INTEGER NOT NULL
) WITHOUT ROWID;

-- The newest first: whoever wants one row stops where it is.
CREATE VIEW ids AS
SELECT task_id, task_no FROM ids_new
UNION ALL
SELECT task_id, task_no FROM ids_recent
UNION ALL
SELECT task_id, task_no FROM ids_old;

-- The first two, and how far along the ids each was emptied. What moves is never less than a part: with few tasks to a
-- batch, moving them one by one would touch more pages than it spares.
CREATE TABLE shelves (
    shelf TEXT PRIMARY KEY,
    room INTEGER NOT NULL,
    part INTEGER NOT NULL,
    held INTEGER NOT NULL,
    emptied TEXT NOT NULL, -- the last id that moved
    emptying TEXT NOT NULL -- the last id that moves now
) WITHOUT ROWID;

INSERT INTO shelves VALUES ('new', 4096, 512, 0, '', ''), ('recent', 65536, 512, 0, '', '');
-- What is stored of a finished task beside its row: its request, updates, handovers and result, compressed into one (see
-- `task_packs`). A task is in a pack, or in the tables of these, never in both. Of the result of a packed task the row
-- keeps what queries look into: the error message, if there is one.
CREATE TABLE packs (
    task_no INTEGER PRIMARY KEY,
    pack BLOB NOT NULL
);
-- What the packed tasks of each tenant take, about: counted as they are packed and erased.
CREATE TABLE stored_sizes (
    tenant_id TEXT PRIMARY KEY,
    tasks INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) WITHOUT ROWID;

INSERT INTO stored_sizes
SELECT t.tenant_id, count(*), sum(900 + length(p.pack))
FROM packs AS p CROSS JOIN a2a_tasks AS t ON t.task_no = p.task_no
GROUP BY t.tenant_id;

-- What is left of erased tasks, by where they ended. No task is sent under such an id again.
CREATE TABLE aged_out (
    settled_place INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL
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
CREATE INDEX children ON a2a_tasks (parent_no) WHERE parent_no IS NOT NULL;
-- For listings of a tenant's tasks. Partial: a task of the mailbox, which has no tenant, pays for none of it, unless it
-- has a context.
CREATE INDEX listed ON a2a_tasks (recipient_pubkey, updated_at, task_no) WHERE tenant_id <> '';
CREATE INDEX listed_by_state ON a2a_tasks (recipient_pubkey, state, updated_at, task_no) WHERE tenant_id <> '';
CREATE INDEX listed_by_context ON a2a_tasks (context_no, recipient_pubkey, updated_at, task_no)
WHERE context_no IS NOT NULL;

-- As they were sent: all of a tenant's, or of none, and those of a door that few use, which must not look through the others.
CREATE INDEX sent_by_tenant ON a2a_tasks (tenant_id, created_at);
CREATE INDEX simple_by_tenant ON a2a_tasks (tenant_id, created_at) WHERE origin = 'simple';
-- Counted as they move by whoever writes them, because counting a million rows for a page of fifty would not be flat.
CREATE TABLE task_counts (
    recipient_pubkey TEXT NOT NULL,
    recipient_display TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    ledger_state TEXT NOT NULL,
    state TEXT NOT NULL,
    tasks INTEGER NOT NULL,
    PRIMARY KEY (recipient_pubkey, recipient_display, tenant_id, ledger_state, state)
) WITHOUT ROWID;

INSERT INTO task_counts
SELECT recipient_pubkey, recipient_display, tenant_id, ledger_state, state, count(*) FROM a2a_tasks
GROUP BY 1, 2, 3, 4, 5;
-- For finding tasks: by the moment of their creation within each filter. Every task is in four of these. The others are
-- partial: of open tasks, of those that did not succeed, and of those that have what is asked for at all. By tenant,
-- context and parent, the indexes of listings and trees serve.
CREATE INDEX found_created ON a2a_tasks (created_at);
CREATE INDEX found_moved ON a2a_tasks (updated_at);
CREATE INDEX found_by_agent ON a2a_tasks (recipient_display, created_at);
CREATE INDEX found_by_sender ON a2a_tasks (sender_display, created_at);
CREATE INDEX found_by_origin ON a2a_tasks (origin, created_at);
CREATE INDEX found_open ON a2a_tasks (ledger_state, created_at) WHERE ledger_state <> 'resolved';
CREATE INDEX found_open_by_agent ON a2a_tasks (recipient_display, ledger_state, created_at)
WHERE ledger_state <> 'resolved';
CREATE INDEX found_unsuccessful ON a2a_tasks (ending, created_at) WHERE ending <> 'completed';
CREATE INDEX found_unsuccessful_by_agent ON a2a_tasks (recipient_display, ending, created_at)
WHERE ending <> 'completed';
CREATE INDEX found_by_cause ON a2a_tasks (cause, created_at) WHERE cause <> 'result';
CREATE INDEX found_by_kind ON a2a_tasks (task_kind, created_at) WHERE task_kind IS NOT NULL;
CREATE INDEX found_by_key ON a2a_tasks (idempotency_key, created_at) WHERE idempotency_key IS NOT NULL;
CREATE INDEX found_retried ON a2a_tasks (created_at) WHERE attempt > 1;
PRAGMA user_version = 9;
