-- Partial, so that finished tasks neither fill these nor slow them. `settled_place IS NULL` means live.
CREATE INDEX live ON a2a_tasks (ledger_state, place) WHERE settled_place IS NULL;
CREATE INDEX live_by_recipient ON a2a_tasks (recipient_pubkey, ledger_state, place)
WHERE settled_place IS NULL;
CREATE INDEX live_by_sender ON a2a_tasks (sender_pubkey, ledger_state, place)
WHERE settled_place IS NULL;
CREATE INDEX live_by_lessee ON a2a_tasks (leased_to_pubkey, ledger_state, place)
WHERE settled_place IS NULL AND leased_to_pubkey IS NOT NULL;
CREATE INDEX pending ON a2a_tasks (settled_place) WHERE ledger_state = 'result_pending';
CREATE INDEX pending_by_sender ON a2a_tasks (sender_pubkey, settled_place)
WHERE ledger_state = 'result_pending';
CREATE INDEX finished ON a2a_tasks (settled_place) WHERE settled_place IS NOT NULL;
CREATE INDEX children ON a2a_tasks (parent_no) WHERE parent_no IS NOT NULL;
