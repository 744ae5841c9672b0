"""What operators are told of peers, byte for byte. Part of the list in `test_answers`."""

from covenant.doors.operator_api.delegation import (
    DelegatedAnswer,
    DelegationAnswer,
    DelegationList,
    DelegationTreeAnswer,
    PeerQuotaShown,
    PeerUsageAnswer,
    PeerUsageShown,
    ProofAnswer,
    delegation_shown,
)
from covenant.doors.operator_api.operation import ApiAnswer, fill
from covenant.doors.operator_api.peers import (
    CapabilitiesAnswer,
    CapabilitiesShown,
    CertifiedKey,
    ConfigAnswer,
    Discovered,
    PeerAnswer,
    PeerList,
    PeerMessageList,
    PeerMessageShown,
    PeerRemovedAnswer,
    PurposeKeysAnswer,
    TokensRevoked,
    peer_shown,
)
from covenant.ledger.contract.tasks import TreeNode
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import (
    Delegation,
    DelegationRole,
    DelegationState,
    LoggedMessage,
    Peer,
    PeerCapabilities,
    PeerLimits,
    PendingMessages,
)
from covenant.model.peers.delegation_messages import Profile, Proof, TokenUsage
from covenant.model.peers.instance import InstanceId, KeyPurpose, Trust

ID = InstanceId("frd1_" + "a" * 40)
PROFILE = Profile(name="coder", description="writes", max_token_budget=9)
KNOWN = PeerCapabilities(
    profiles=(PROFILE,),
    versions=(2,),
    active_delegations=1,
    free_slots=4,
    trust_level=Trust.VERIFIED,
    issued_at_ms=5,
    expires_at_ms=6,
    token="never shown",
)
PEER = peer_shown(
    Peer(
        id=ID,
        name="lab",
        url="https://lab",
        trust=Trust.VERIFIED,
        added_at_ms=1,
        verified_at_ms=2,
        capabilities=KNOWN,
        heard_at_ms=3,
        limits=PeerLimits(concurrent=2),
    ),
    PendingMessages(1, "no answer", 7),
    now_ms=4,
)
DELEGATION = delegation_shown(
    Delegation(
        role=DelegationRole.REQUESTER,
        peer=ID,
        offer_id="o-1",
        task_id=TaskId("t-1"),
        profile="coder",
        state=DelegationState.RUNNING,
        budget=9,
        timeout_ms=8,
        delegation_id="d-1",
        made_at_ms=1,
        moved_at_ms=2,
        heard_at_ms=2,
        usage=TokenUsage(prompt=1, completion=2, total=3),
        progress=0.5,
        message="half done",
    ),
    "lab",
)
PROOF = Proof(
    delegation_id="d-1",
    offer_hash="h1",
    result_hash="h2",
    transcript_root="h3",
    entries=1,
    token_usage=TokenUsage(),
    provider=ID,
    requester=ID,
    provider_key="k",
    issued_at_ms=1,
    signature="s",
)
LOGGED = LoggedMessage(at_ms=1, direction="received", peer=ID, typ="delegation_offer", id="j-1", offer_id="o-1")
MESSAGE = fill(PeerMessageShown, LOGGED, type=LOGGED.typ)
SHOWN = CapabilitiesShown(
    profiles=(PROFILE,),
    versions=(2,),
    active_delegations=1,
    free_slots=4,
    trust_level=Trust.VERIFIED,
    issued_at_ms=5,
    expires_at_ms=6,
)

USED = PeerUsageShown(
    day="2026-01-02",
    role=DelegationRole.PROVIDER,
    peer_id=ID,
    peer="lab",
    profile="coder",
    offers=3,
    accepted=2,
    rejected=1,
    completed=1,
    failed=1,
    cancelled=0,
    timeout=0,
    tokens=15,
)
QUOTA = PeerQuotaShown(peer_id=ID, peer="lab", accepted_today=2, tokens_today=15, offers_per_day=10)


GOLDEN: list[tuple[ApiAnswer, str]] = [
    (
        PeerAnswer(peer=PEER, note="n"),
        (
            '{"kind":"peer","peer":{"id":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","name":"lab","url":"http'
            's://lab","publicKey":null,"fingerprint":"0000000000000000","trustLevel":"verified","tenant":"default","denied":false,"source":"operator","status":"offli'
            'ne","lastSeen":3,"addedAtMs":1,"verifiedAtMs":2,"conflict":null,"formerIds":[],"capabilities":[{"name":"coder","des'
            'cription":"writes","maxTokenBudget":9}],"limits":{"concurrent":2},"waiting":{"count":1,"failure":"no'
            ' answer","nextMs":7}},"note":"n"}'
        ),
    ),
    (
        PeerList(peers=(PEER,), total=1, id=ID, name="us"),
        (
            '{"kind":"peers","peers":[{"id":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","name":"lab","url":"h'
            'ttps://lab","publicKey":null,"fingerprint":"0000000000000000","trustLevel":"verified","tenant":"default","denied":false,"source":"operator","status":"of'
            'fline","lastSeen":3,"addedAtMs":1,"verifiedAtMs":2,"conflict":null,"formerIds":[],"capabilities":[{"name":"coder","'
            'description":"writes","maxTokenBudget":9}],"limits":{"concurrent":2},"waiting":{"count":1,"failure":'
            '"no answer","nextMs":7}}],"total":1,"id":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","name":"us"'
            "}"
        ),
    ),
    (
        PeerRemovedAnswer(id=ID, name="lab"),
        ('{"kind":"peer_removed","id":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","name":"lab"}'),
    ),
    (
        TokensRevoked(id=ID, revoked=2),
        ('{"kind":"peer_tokens_revoked","id":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","revoked":2}'),
    ),
    (
        PurposeKeysAnswer(id=ID, keys=(), compromised=True),
        (
            '{"kind":"purpose_keys_rotated","id":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","keys":[],'
            '"compromised":true}'
        ),
    ),
    (
        PurposeKeysAnswer(
            id=ID, keys=(CertifiedKey(purpose=KeyPurpose.TOKENS, key="k", not_after_ms=5),), compromised=False
        ),
        (
            '{"kind":"purpose_keys_rotated","id":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","keys":[{"purpose":"tokens",'
            '"key":"k","notAfterMs":5}],"compromised":false}'
        ),
    ),
    (
        Discovered(discovered=({"url": "u"},), ways=()),
        ('{"kind":"peers_discovered","discovered":[{"url":"u"}],"ways":[]}'),
    ),
    (
        CapabilitiesAnswer(peer="lab", capabilities=SHOWN),
        (
            '{"kind":"peer_capabilities","peer":"lab","capabilities":{"profiles":[{"name":"coder","description":"'
            'writes","maxTokenBudget":9}],"versions":[2],"activeDelegations":1,"freeSlots":4,"trustLevel":"verifi'
            'ed","issuedAtMs":5,"expiresAtMs":6}}'
        ),
    ),
    (
        CapabilitiesAnswer(peer=None, capabilities=SHOWN),
        (
            '{"kind":"peer_capabilities","peer":null,"capabilities":{"profiles":[{"name":"coder","description":"w'
            'rites","maxTokenBudget":9}],"versions":[2],"activeDelegations":1,"freeSlots":4,"trustLevel":"verifie'
            'd","issuedAtMs":5,"expiresAtMs":6}}'
        ),
    ),
    (
        DelegatedAnswer(delegation_id="t-1", peer_id=ID, profile="coder", status="pending", remote=True),
        (
            '{"kind":"delegated","delegationId":"t-1","peerId":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","p'
            'rofile":"coder","status":"pending","remote":true}'
        ),
    ),
    (
        DelegationAnswer(delegation=DELEGATION, result="done"),
        (
            '{"kind":"delegation","delegation":{"id":"t-1","offerId":"o-1","delegationId":"d-1","role":"requester'
            '","peerId":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","peer":"lab","profile":"coder","status":"'
            'running","state":"running","remote":true,"maxTokenBudget":9,"timeout":8,"tokenUsage":{"prompt":1,"co'
            'mpletion":2,"total":3},"progress":0.5,"message":"half done","code":null,"reason":null,"retryAfter":n'
            'ull,"overspent":false,"broken":[],"redacted":0,"proven":false,"madeAtMs":1,"movedAtMs":2,"heardAtMs"'
            ':2},"result":"done"}'
        ),
    ),
    (
        DelegationList(delegations=(DELEGATION,), total=1),
        (
            '{"kind":"delegations","delegations":[{"id":"t-1","offerId":"o-1","delegationId":"d-1","role":"reques'
            'ter","peerId":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","peer":"lab","profile":"coder","status'
            '":"running","state":"running","remote":true,"maxTokenBudget":9,"timeout":8,"tokenUsage":{"prompt":1,'
            '"completion":2,"total":3},"progress":0.5,"message":"half done","code":null,"reason":null,"retryAfter'
            '":null,"overspent":false,"broken":[],"redacted":0,"proven":false,"madeAtMs":1,"movedAtMs":2,"heardAt'
            'Ms":2}],"total":1}'
        ),
    ),
    (
        DelegationTreeAnswer(tree=TreeNode(task_id=TaskId("t-1"), task=None, state=None)),
        (
            '{"kind":"delegation_tree","tree":{"task_id":"t-1","task":null,"state":null,"attempt":0,"created_at_m'
            's":null,"updated_at_ms":null,"result_status":null,"children":[]}}'
        ),
    ),
    (
        ProofAnswer(offer={"offerId": "o-1"}, result=None, transcript=None, proof=PROOF),
        (
            '{"kind":"delegation_proof","offer":{"offerId":"o-1"},"result":null,"transcript":null,"proof":{"deleg'
            'ationId":"d-1","offerHash":"h1","resultHash":"h2","transcriptRoot":"h3","entries":1,"tokenUsage":{"p'
            'rompt":0,"completion":0,"total":0},"provider":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","reque'
            'ster":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","providerKey":"k","issuedAtMs":1,"signature":"'
            's"}}'
        ),
    ),
    (
        PeerMessageList(messages=(MESSAGE,), total=1),
        (
            '{"kind":"peer_messages","messages":[{"atMs":1,"direction":"received","peer":"frd1_aaaaaaaaaaaaaaaaa'
            'aaaaaaaaaaaaaaaaaaaaaaa","type":"delegation_offer","id":"j-1","offerId":"o-1"}],"total":1}'
        ),
    ),
    (
        ConfigAnswer(id=ID, name="us", config={"slots": 5}),
        (
            '{"kind":"peer_config","id":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","name":"us","config":{"sl'
            'ots":5}}'
        ),
    ),
    (
        PeerUsageAnswer(usage=(USED,), total=1, quotas=(QUOTA,)),
        (
            '{"kind":"peer_usage","usage":[{"day":"2026-01-02","role":"provider","peerId":"frd1_aaaaaaaaaaaaaaaaaaaaaaa'
            'aaaaaaaaaaaaaaaaa","peer":"lab","profile":"coder","offers":3,"accepted":2,"rejected":1,"completed":1,"fail'
            'ed":1,"cancelled":0,"timeout":0,"tokens":15}],"total":1,"quotas":[{"peerId":"frd1_aaaaaaaaaaaaaaaaaaaaaaaaa'
            'aaaaaaaaaaaaaaa","peer":"lab","acceptedToday":2,"tokensToday":15,"offersPerDay":10}]}'
        ),
    ),
]
