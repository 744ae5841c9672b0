-- What agents note between their tasks: an agent finds it at whichever daemon it works.

CREATE TABLE notes (
    tenant text NOT NULL,
    agent_id text NOT NULL,
    version bigint NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (tenant, agent_id)
);
