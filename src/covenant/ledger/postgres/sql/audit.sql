-- The audit: one chain a node, each row with its place among the rows of all chains.

-- :recent
SELECT chain, idx, place, ts_ms, row FROM (
    SELECT chain, idx, place, ts_ms, row FROM audit
    WHERE
        (:issuer::text IS NULL OR issuer = :issuer)
        AND place < :below
        AND place <= coalesce(
            (SELECT max(place) FROM (SELECT place FROM audit WHERE ts_ms < :before_ms ORDER BY ts_ms DESC LIMIT 1000) AS o),
            0
        )
        AND place >= coalesce((SELECT min(place) FROM audit WHERE ts_ms >= :since_ms), 0)
        AND ts_ms >= :since_ms
        AND ts_ms < :before_ms
    ORDER BY place DESC
    LIMIT :count
) AS x
ORDER BY place

-- :before
SELECT x.chain, x.rows, x.through, a.chain_hash
FROM (
    SELECT b.chain, count(*) AS rows, max(b.idx) AS through FROM audit AS b
    WHERE b.idx < coalesce((SELECT min(n.idx) FROM audit AS n WHERE n.chain = b.chain AND n.ts_ms >= :before_ms), b.idx + 1)
    GROUP BY b.chain
) AS x JOIN audit AS a ON a.chain = x.chain AND a.idx = x.through
ORDER BY x.chain

-- :chains
SELECT
    w.node AS chain, w.audit_index, w.audit_hash, coalesce(c.anchor_index, 0) AS anchor_index,
    coalesce(c.anchor_hash, '') AS anchor_hash, coalesce(c.verified_index, 0) AS verified_index,
    coalesce(c.verified_hash, '') AS verified_hash,
    (SELECT coalesce(min(a.idx), 0) FROM audit AS a WHERE a.chain = w.node) AS first
FROM writers AS w LEFT JOIN audit_chains AS c ON c.chain = w.node
ORDER BY w.node

-- :heads
SELECT node AS chain, audit_index, audit_hash FROM writers WHERE audit_index > 0 ORDER BY node

-- :cut
SELECT u.chain, u.idx, a.chain_hash IS NULL AS missing
FROM unnest(:chains::text[], :idxs::bigint[], :hashes::text[]) WITH ORDINALITY AS u (chain, idx, chain_hash, n)
LEFT JOIN LATERAL (SELECT x.chain_hash FROM audit AS x WHERE x.chain = u.chain AND x.idx = u.idx) AS a ON true
WHERE
    a.chain_hash IS DISTINCT FROM u.chain_hash
    AND u.idx > coalesce((SELECT c.anchor_index FROM audit_chains AS c WHERE c.chain = u.chain), 0)
ORDER BY u.n

-- :page
SELECT idx, ts_ms, issuer, chain_hash, row FROM audit WHERE chain = :chain AND idx > :after ORDER BY idx LIMIT :count

-- :verified
INSERT INTO audit_chains AS c (chain, anchor_index, anchor_hash, verified_index, verified_hash)
VALUES (:chain, 0, :genesis, :index, :hash)
ON CONFLICT (chain) DO UPDATE SET verified_index = excluded.verified_index, verified_hash = excluded.verified_hash
