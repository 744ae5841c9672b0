-- What all nodes have in common besides the ledger: secrets, locked with a passphrase that the database does not know;
-- and which node does what one node alone may do. It does so for as long as its run lives.

CREATE TABLE secrets (name text PRIMARY KEY, body text NOT NULL);
CREATE TABLE singletons (name text PRIMARY KEY, node text NOT NULL, boot text NOT NULL) WITH (fillfactor = 50);
