-- Files beside the ledger: the bytes of blobs in chunks, and which tasks refer to them.
CREATE TABLE blob_upload (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    begun_at_ms bigint NOT NULL
);

CREATE TABLE blob_chunk (
    upload_id bigint NOT NULL,
    no integer NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (upload_id, no)
);
-- Files are mostly compressed already, and a chunk is read as a whole.
ALTER TABLE blob_chunk ALTER COLUMN body SET STORAGE EXTERNAL;

CREATE TABLE blob (
    space text NOT NULL,
    sha256 text NOT NULL,
    size bigint NOT NULL,
    stored_at_ms bigint NOT NULL,
    upload_id bigint NOT NULL,
    PRIMARY KEY (space, sha256)
);

CREATE TABLE blob_reference (
    space text NOT NULL,
    sha256 text NOT NULL,
    task_id text NOT NULL,
    made_at_ms bigint NOT NULL,
    PRIMARY KEY (space, sha256, task_id),
    FOREIGN KEY (space, sha256) REFERENCES blob ON DELETE CASCADE
);
