-- The rows that a purge would drop: those before the first one that is not older. The clock may have been set back, so
-- this is the first by index and not the first by time; `+` limits the walk to the rows that would be dropped.
SELECT json_array(dropped.count, dropped.through, audit.chain_hash)
FROM (
    SELECT count(*) AS count, max(idx) AS through FROM audit
    WHERE
        idx < coalesce(
            (SELECT idx FROM audit WHERE +ts_ms >= :before_ms ORDER BY idx LIMIT 1),
            (SELECT max(idx) + 1 FROM audit)
        )
) AS dropped LEFT JOIN audit ON audit.idx = dropped.through
