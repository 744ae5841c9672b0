-- One row a task, rewritten whenever the task changes. The request, which may be large and never changes, is
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
