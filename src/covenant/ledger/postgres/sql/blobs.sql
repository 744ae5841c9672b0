-- Blobs, their references and their uploads. An upload that began at 0 is condemned: its bytes are dropped, and it is not
-- published.

-- :begin
INSERT INTO blob_upload (begun_at_ms) VALUES (extract(epoch FROM clock_timestamp()) * 1000) RETURNING id

-- :write
INSERT INTO blob_chunk (upload_id, no, body) VALUES (:upload_id, :no, :body)

-- :forget
DELETE FROM blob_upload WHERE id = :upload_id

-- :lock_upload
SELECT id FROM blob_upload WHERE id = :upload_id AND begun_at_ms > 0 FOR UPDATE

-- :condemn_upload
UPDATE blob_upload SET begun_at_ms = 0 WHERE id = :upload_id RETURNING id

-- :condemned_upload
INSERT INTO blob_upload (id, begun_at_ms) OVERRIDING SYSTEM VALUE VALUES (:upload_id, 0)

-- :lock_space
SELECT pg_advisory_xact_lock(hashtextextended('covenant.blobs.' || :space::text, 0))

-- :touch
UPDATE blob SET stored_at_ms = extract(epoch FROM clock_timestamp()) * 1000
WHERE space = :space AND sha256 = :sha256 RETURNING size

-- :publish
WITH whole AS (DELETE FROM blob_upload WHERE id = :upload_id)
INSERT INTO blob (space, sha256, size, stored_at_ms, upload_id)
VALUES (:space, :sha256, :size, extract(epoch FROM clock_timestamp()) * 1000, :upload_id)

-- :replace
WITH new AS (
    UPDATE blob SET upload_id = :upload_id, size = :size
    WHERE space = :space AND sha256 = :sha256 AND upload_id = :damaged RETURNING sha256
), whole AS (DELETE FROM blob_upload WHERE id = :upload_id AND EXISTS (SELECT FROM new))
INSERT INTO blob_upload (id, begun_at_ms) OVERRIDING SYSTEM VALUE SELECT :damaged::bigint, 0 FROM new RETURNING id

-- :refer
-- After `touch` or `publish`. As old as its blob: rounds that would find a younger one leave out the older blob.
INSERT INTO blob_reference (space, sha256, task_id, made_at_ms)
SELECT space, sha256, :task_id::text, stored_at_ms FROM blob WHERE space = :space AND sha256 = :sha256
ON CONFLICT (space, sha256, task_id) DO UPDATE SET made_at_ms = EXCLUDED.made_at_ms

-- :find
SELECT size, upload_id FROM blob WHERE space = :space AND sha256 = :sha256
AND (:task_id::text IS NULL OR EXISTS (
    SELECT FROM blob_reference WHERE space = :space AND sha256 = :sha256 AND task_id = :task_id::text))

-- :chunk
SELECT body FROM blob_chunk WHERE upload_id = :upload_id AND no = :no

-- :usage
SELECT count(*) AS files, coalesce(sum(size), 0)::bigint AS bytes FROM blob
WHERE (:space::text IS NULL OR space = :space::text)

-- :listing
SELECT sha256, size, stored_at_ms,
    (SELECT count(*) FROM blob_reference r WHERE r.space = b.space AND r.sha256 = b.sha256) AS references,
    ARRAY(SELECT task_id FROM blob_reference r WHERE r.space = b.space AND r.sha256 = b.sha256
        ORDER BY task_id LIMIT 10) AS tasks
FROM blob b WHERE space = :space AND sha256 > :after ORDER BY sha256 LIMIT :limit

-- :page
-- After this blob, or at it if not all of its references were looked at. Each reference renews its blob's time.
SELECT space, sha256 FROM blob WHERE (space, sha256) >= (:space, :sha256) AND stored_at_ms >= :since_ms
AND (space <> :space OR sha256 <> :sha256 OR :task_id <> '~') ORDER BY space, sha256 LIMIT :limit

-- :old_references
SELECT task_id FROM blob_reference WHERE space = :space AND sha256 = :sha256 AND made_at_ms < :before_ms
AND made_at_ms >= :since_ms AND task_id > :task_id ORDER BY task_id LIMIT :limit

-- :drop_references
DELETE FROM blob_reference
WHERE space = :space AND sha256 = :sha256 AND task_id = ANY(:tasks::text[]) AND made_at_ms < :before_ms

-- :collect
DELETE FROM blob b WHERE space = :space AND sha256 = :sha256 AND stored_at_ms < :before_ms
AND NOT EXISTS (SELECT FROM blob_reference r WHERE r.space = b.space AND r.sha256 = b.sha256)
RETURNING size, upload_id

-- :drop_chunks
DELETE FROM blob_chunk WHERE upload_id = :upload_id

-- :condemn_stale_uploads
UPDATE blob_upload SET begun_at_ms = 0 WHERE id IN (
    SELECT id FROM blob_upload WHERE begun_at_ms < :before_ms LIMIT 1000 FOR UPDATE SKIP LOCKED
)
RETURNING id

-- :erase
WITH gone AS (DELETE FROM blob WHERE space = :space RETURNING upload_id)
INSERT INTO blob_upload (id, begun_at_ms) OVERRIDING SYSTEM VALUE SELECT upload_id, 0 FROM gone RETURNING id

-- :references
SELECT task_id FROM blob_reference WHERE space = :space AND sha256 = :sha256 ORDER BY task_id LIMIT 10
