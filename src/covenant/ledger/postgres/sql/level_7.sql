-- What each peer had of us and we of it, by profile and day.

CREATE TABLE peer_usage (
    day integer NOT NULL, -- from 1970, in UTC
    role text NOT NULL,
    peer text NOT NULL,
    profile text NOT NULL,
    offers bigint NOT NULL DEFAULT 0,
    accepted bigint NOT NULL DEFAULT 0,
    rejected bigint NOT NULL DEFAULT 0,
    completed bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    cancelled bigint NOT NULL DEFAULT 0,
    timeout bigint NOT NULL DEFAULT 0,
    tokens bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (day, role, peer, profile)
);
