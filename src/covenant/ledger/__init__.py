"""The durable ledger: one pure state machine, one contract, and the engines that store it."""
