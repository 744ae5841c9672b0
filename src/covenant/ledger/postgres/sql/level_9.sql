-- Whether the ledger came from a home, or has left for one: then no daemon serves it here any more.

CREATE TABLE moves (
    id text PRIMARY KEY,
    direction text NOT NULL,
    at_ms bigint NOT NULL,
    home text NOT NULL
);
