-- The ledger's tables. Rows are the truth; `events` is the history of each task.

CREATE SEQUENCE task_numbers INCREMENT 1000; -- a node takes a thousand at once
CREATE SEQUENCE places; -- one a batch: first in is first out, also between nodes
CREATE SEQUENCE writer_numbers;

CREATE TABLE nodes (
    node text PRIMARY KEY,
    boot text NOT NULL,
    seen_ms bigint NOT NULL, -- by the database's clock, as are the others
    until_ms bigint NOT NULL,
    lost_at_ms bigint,
    registers_seen bigint NOT NULL DEFAULT 0,
    level integer NOT NULL,
    settings_hash text NOT NULL DEFAULT ''
) WITH (fillfactor = 50);

-- Fence, order, and the answer to "did my commit happen?". It moves with each batch.
CREATE TABLE writers (
    writer bigint PRIMARY KEY,
    node text NOT NULL UNIQUE,
    boot text NOT NULL,
    seq bigint NOT NULL DEFAULT 0,
    audit_index bigint NOT NULL DEFAULT 0,
    audit_hash text NOT NULL,
    lost_at_ms bigint
) WITH (fillfactor = 50);

-- What every node has in memory. Each change takes the one row of `registers`, and has its version.
CREATE TABLE registers (only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one), version bigint NOT NULL);
INSERT INTO registers (version) VALUES (0);
CREATE TABLE register_rows (
    kind text NOT NULL,
    name text NOT NULL,
    version bigint NOT NULL,
    made bigint NOT NULL, -- orders them, the oldest first
    body text, -- null: it is gone
    PRIMARY KEY (kind, name)
);
CREATE INDEX register_rows_by_version ON register_rows (version);
CREATE TABLE grant_uses (signature text PRIMARY KEY, used bigint NOT NULL);

CREATE TABLE ids (task_id text PRIMARY KEY, no bigint NOT NULL);

-- Tasks whose result somebody still waits for. `head` is the task without its body, `rest` what decisions know of it.
CREATE TABLE live (
    no bigint PRIMARY KEY,
    task_id text NOT NULL,
    n integer NOT NULL, -- its version: how many events it has had
    state text NOT NULL,
    a2a_state text NOT NULL,
    sender text NOT NULL,
    recipient text NOT NULL,
    lessee text,
    tenant text,
    agent_id text NOT NULL,
    context_id text NOT NULL,
    origin text NOT NULL,
    parent text,
    created_at_ms bigint NOT NULL,
    updated_at_ms bigint NOT NULL,
    generation integer NOT NULL,
    turn integer NOT NULL,
    attempt integer NOT NULL,
    deadline_ms bigint,
    place bigint NOT NULL, -- where it was last queued, or began to follow
    settled_place bigint,
    touched bigint, -- where it was last leased or renewed
    touched_at_ms bigint,
    due_at_ms bigint,
    shared text,
    node text,
    boot text,
    interrupted boolean NOT NULL,
    pushed boolean NOT NULL, -- it has, or had, push configurations
    ended_n integer, -- which of its events has the result
    head text NOT NULL,
    rest text NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX live_by_recipient ON live (recipient);
CREATE INDEX live_due ON live (due_at_ms) WHERE due_at_ms IS NOT NULL;
CREATE INDEX live_shared ON live (shared) WHERE shared IS NOT NULL;
CREATE INDEX live_children ON live (parent) WHERE parent IS NOT NULL;

-- The others: written once, when the task leaves `live`.
CREATE TABLE tasks (
    no bigint PRIMARY KEY,
    task_id text NOT NULL,
    n integer NOT NULL,
    a2a_state text NOT NULL,
    sender text NOT NULL,
    recipient text NOT NULL,
    lessee text,
    tenant text,
    agent_id text NOT NULL,
    context_id text NOT NULL,
    origin text NOT NULL,
    parent text,
    created_at_ms bigint NOT NULL,
    updated_at_ms bigint NOT NULL,
    generation integer NOT NULL,
    turn integer NOT NULL,
    attempt integer NOT NULL,
    settled_place bigint NOT NULL,
    ended_n integer NOT NULL,
    error_message text NOT NULL,
    rest text NOT NULL
);
CREATE INDEX tasks_listed ON tasks (recipient, updated_at_ms, no) WHERE tenant IS NOT NULL;
CREATE INDEX tasks_by_state ON tasks (recipient, a2a_state, updated_at_ms, no) WHERE tenant IS NOT NULL;
CREATE INDEX tasks_by_context ON tasks (recipient, context_id, updated_at_ms, no) WHERE tenant IS NOT NULL;
CREATE INDEX tasks_of_tenant ON tasks (tenant, no) WHERE tenant IS NOT NULL;
CREATE INDEX tasks_simple ON tasks (tenant, no) WHERE origin = 'simple';
CREATE INDEX tasks_children ON tasks (parent) WHERE parent IS NOT NULL;

-- The history of a task, as JSON text: the first row has the task, the one that ended it the result.
CREATE TABLE events (
    no bigint NOT NULL,
    n integer NOT NULL,
    generation integer NOT NULL, -- 0: no watcher sees it
    ts_ms bigint NOT NULL,
    kind text NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (no, n)
);

CREATE TABLE queue (recipient text NOT NULL, place bigint NOT NULL, no bigint NOT NULL, PRIMARY KEY (recipient, place));
CREATE TABLE results (sender text NOT NULL, place bigint NOT NULL, no bigint NOT NULL, PRIMARY KEY (sender, place));
CREATE INDEX results_in_order ON results (place);

CREATE TABLE requests (
    verb text NOT NULL,
    holder text NOT NULL,
    request_id text NOT NULL,
    place bigint NOT NULL,
    given text NOT NULL,
    PRIMARY KEY (verb, holder, request_id)
);
CREATE INDEX requests_in_order ON requests (place);

-- Work that several tasks share: who leads it, and what came of it.
CREATE TABLE shared (
    key text PRIMARY KEY,
    name text NOT NULL,
    leader text,
    cached text,
    cached_at_ms bigint,
    cached_bytes bigint NOT NULL DEFAULT 0,
    cached_place bigint
);
CREATE INDEX shared_cached ON shared (cached_place) WHERE cached IS NOT NULL;

CREATE TABLE lane_counts (
    kind text NOT NULL,
    lane text NOT NULL,
    writer bigint NOT NULL,
    n bigint NOT NULL,
    PRIMARY KEY (kind, lane, writer)
) WITH (fillfactor = 70);

CREATE TABLE pushes (
    task_id text NOT NULL,
    id text NOT NULL,
    made bigint NOT NULL,
    idle_at_ms bigint,
    body text NOT NULL,
    PRIMARY KEY (task_id, id)
);
CREATE INDEX pushes_idle ON pushes (idle_at_ms) WHERE idle_at_ms IS NOT NULL;

CREATE TABLE delegations (
    role text NOT NULL,
    peer text NOT NULL,
    offer_id text NOT NULL,
    task_id text NOT NULL,
    moved bigint NOT NULL,
    ended boolean NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (role, peer, offer_id)
);
CREATE INDEX delegations_of_task ON delegations (task_id);
CREATE INDEX delegations_in_order ON delegations (moved);
CREATE TABLE parcels (
    role text NOT NULL,
    peer text NOT NULL,
    offer_id text NOT NULL,
    seq bigint NOT NULL,
    made bigint NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (peer, role, offer_id, seq)
);
CREATE TABLE envelopes (sender text NOT NULL, jti text NOT NULL, until_ms bigint NOT NULL, PRIMARY KEY (sender, jti));
CREATE INDEX envelopes_over ON envelopes (until_ms);
CREATE TABLE peers_heard (peer text PRIMARY KEY, heard_at_ms bigint NOT NULL);
CREATE TABLE messages (place bigint PRIMARY KEY, body text NOT NULL);

-- One chain a node, by its name.
CREATE TABLE audit (
    chain text NOT NULL,
    idx bigint NOT NULL,
    place bigint NOT NULL,
    ts_ms bigint NOT NULL,
    issuer text NOT NULL,
    chain_hash text NOT NULL,
    row text NOT NULL,
    PRIMARY KEY (chain, idx)
);
CREATE INDEX audit_in_order ON audit (place);
CREATE INDEX audit_by_issuer ON audit (issuer, place);
CREATE INDEX audit_by_time ON audit (ts_ms);
CREATE TABLE audit_chains (
    chain text PRIMARY KEY,
    anchor_index bigint NOT NULL,
    anchor_hash text NOT NULL,
    verified_index bigint NOT NULL,
    verified_hash text NOT NULL
);

-- What each batch touched, for the other nodes.
CREATE TABLE news (
    writer bigint NOT NULL,
    seq bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    topics text NOT NULL,
    PRIMARY KEY (writer, seq)
);
CREATE INDEX news_by_time ON news (at);
