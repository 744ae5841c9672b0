-- What each batch has counted, as one row, until the rows of many batches are added to `lane_counts` together. Whoever
-- deletes a row here adds it there, in one statement: anybody may do so at any time.

CREATE TABLE counted (
    batch bigint PRIMARY KEY, -- the numbers of its writer and of the batch, as one
    kinds text[] NOT NULL,
    lanes text[] NOT NULL,
    ns bigint[] NOT NULL
);
ALTER TABLE counted ALTER COLUMN kinds SET STORAGE EXTERNAL, ALTER COLUMN lanes SET STORAGE EXTERNAL;

CREATE VIEW counts AS
SELECT kind, lane, n FROM lane_counts
UNION ALL
SELECT u.kind, u.lane, u.n FROM counted AS c CROSS JOIN LATERAL unnest(c.kinds, c.lanes, c.ns) AS u (kind, lane, n);
