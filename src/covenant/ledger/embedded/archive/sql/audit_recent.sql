-- The newest audit rows since a time, oldest first. The clock may have been set back, so time only tells where to
-- begin: at the first row, by index, that is new enough.
SELECT json_group_array(json_object('index', idx, 'timestamp_ms', ts_ms, 'row', row)) FROM (
    SELECT * FROM (
        SELECT idx, ts_ms, row FROM audit
        WHERE
            {issuer}
            AND idx >= coalesce((SELECT min(idx) FROM audit WHERE ts_ms >= :since_ms), 0)
            AND +ts_ms >= :since_ms
        ORDER BY idx DESC
        LIMIT :limit
    )
    ORDER BY idx
)
