-- Audit rows to verify, after an index. In hexadecimal: a tampered row may not be text any more.
SELECT
    json_group_array(
        json_array(
            idx,
            hex(CAST(row AS BLOB)),
            hex(CAST(chain_hash AS BLOB)),
            json(
                iif(
                    json_valid(row)
                    AND issuer IS json_extract(row, '$.issuer.pubkey')
                    AND ts_ms IS json_extract(row, '$.timestamp_ms'),
                    'true',
                    'false'
                )
            )
        )
    )
FROM (SELECT * FROM audit WHERE idx > :after ORDER BY idx LIMIT :limit)
