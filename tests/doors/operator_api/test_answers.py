"""Every answer, byte for byte: clients in other languages rely on each of these."""

import msgspec
import pytest

from covenant.doors.file_transfer import FileShown, StoredFileList
from covenant.doors.operator_api.attention import Attention, Need
from covenant.doors.operator_api.daemon_operations import (
    BackupBegun,
    BackupEnded,
    DrainProgress,
    NodeList,
    SettingShown,
    SettingsShown,
)
from covenant.doors.operator_api.identities import (
    AuditIntegrity,
    AuditPurgedAnswer,
    AuditRecent,
    CapabilitiesPurged,
    CapabilityGranted,
    CapabilityList,
    CapabilityRevoked,
    CapabilityShown,
    GrantBudget,
    GrantedAction,
    IdentitiesPurgedAnswer,
    IdentityEnrolledAnswer,
    IdentityList,
    IdentityRevokedAnswer,
    IdentityShown,
    LoginCodeAnswer,
    TokenRotated,
)
from covenant.doors.operator_api.inspection import AgentCardShown, Inspected
from covenant.doors.operator_api.mailbox import (
    LeasedShown,
    LeaseReleasedAnswer,
    LeaseRenewedAnswer,
    LeaseShown,
    QueueShown,
    RequestWithdrawnAnswer,
    ResultOpt,
    ResultPosted,
    TaskCanceled,
    TaskOpt,
    TaskQueued,
    TaskUpdatedAnswer,
)
from covenant.doors.operator_api.operation import (
    ApiAnswer,
    Authenticated,
    AuthenticationFailed,
    ErrorAnswer,
    Pong,
    ProtocolInfo,
    ProtocolVersions,
    encode,
    encode_legacy,
    error_of,
    fill,
)
from covenant.doors.operator_api.tasks import (
    AnsweredTask,
    AutoRetried,
    CompactedAnswer,
    Counted,
    Found,
    FramesShown,
    PushList,
    PushRetried,
    PushShown,
    Repaired,
    RepairedTasks,
    Results,
    SignaledTask,
    TaskLogShown,
    Tasks,
    TaskShown,
    TreeShown,
)
from covenant.doors.operator_api.tenants import (
    AgentAdded,
    AgentAnswer,
    AgentList,
    AgentRemovedAnswer,
    AgentShown,
    ScheduleAnswer,
    ScheduleList,
    ScheduleRemoved,
    ScheduleRun,
    ScheduleShown,
    TenantAdded,
    TenantChanged,
    TenantList,
    TenantListed,
    TenantRemovalAnswer,
    TenantRotated,
    TenantShown,
    TenantTraces,
)
from covenant.exchange.frame_log import LoggedFrame
from covenant.exchange.repair_service import BulkOutcome
from covenant.exchange.schedules import Moment
from covenant.exchange.task_logs import LogLine
from covenant.ledger.contract.ledger import LedgerNode
from covenant.ledger.contract.retention import SearchedPlace
from covenant.ledger.contract.task_query import AgentLanes, FoundTask, LaneCounts
from covenant.ledger.contract.tasks import LeaseRecord, QueueEntry, TreeNode, UpdateRecord
from covenant.model.agent_definition import Advisor, AgentDefinition, CatalogueAgent
from covenant.model.content import Json, Text
from covenant.model.errors import OverLimit
from covenant.model.grant import AuditReport
from covenant.model.ids import AgentId, LeaseId, PublicKey, TaskId
from covenant.model.retry_policy import RepairOutcome, Requeued, RetryPolicy, RetryReport, Skipped, SkipReason
from covenant.model.task import DuplicateSafety, Ending, Idempotency, Result, ResultStatus, Task, error_result
from covenant.model.tenants import LimitUse, TenantLimits, TenantUse
from covenant.outbound.remote.card_lookup import CardSignature
from covenant.outbound.remote.inspector import ConformanceFinding, InspectedFrame, InspectedTurn
from tests.doors.operator_api.peer_golden import GOLDEN as PEER_GOLDEN

T, T2, L = TaskId("t-1"), TaskId("t-2"), LeaseId("l-1")
ALICE, BOB = AgentId("alice@x", PublicKey("A")), AgentId("bob@x", PublicKey("B"))
AGENTS = '"sender":{"display":"alice@x","pubkey":"A"},"recipient":{"display":"bob@x","pubkey":"B"}'

TASK = Task(id=T, sender=ALICE, recipient=BOB, intent_text="do it")
TASK_JSON = f'{{"id":"t-1",{AGENTS},"intent_text":"do it"}}'
FULL = Task(
    id=T,
    sender=ALICE,
    recipient=BOB,
    intent_text="do it",
    task_kind="k",
    parent=T2,
    deadline_ms=9,
    idempotency=Idempotency(DuplicateSafety.IDEMPOTENT, "key"),
    parts=(Text("hi"), Json({"a": None})),
    timeout_ms=8,
    context_id="c",
)
FULL_JSON = (
    f'{{"id":"t-1",{AGENTS},"intent_text":"do it","task_kind":"k","parent":"t-2","deadline_ms":9,'
    '"idempotency":{"duplicate_safety":"idempotent","key":"key"},'
    '"parts":[{"type":"text","text":"hi"},{"type":"json","value":{"a":null}}],"timeout_ms":8,"context_id":"c"}'
)
OK = Result(task_id=T, status=ResultStatus.OK, content=(Text("done"),))
OK_JSON = '{"task_id":"t-1","status":"ok","content":[{"type":"text","text":"done"}]}'
ERROR_JSON = '{"task_id":"t-1","status":"error","content":[],"error_message":"no"}'
LEASE = LeaseShown(L, 1, 5)
LEASE_JSON = '{"lease_id":"l-1","attempt":1,"leased_at_ms":5}'
TENANT = TenantShown(
    name="acme",
    token_prefix="atr_1",
    created_at_ms=1,
    disabled=True,
    disabled_at_ms=2,
    limits=TenantLimits(rate_per_min=3),
    agents=1,
)
TENANT_JSON = (
    '{"name":"acme","token_prefix":"atr_1","created_at_ms":1,"disabled":true,"disabled_at_ms":2,'
    '"limits":{"concurrency":0,"rate_per_min":3,"burst":0,"connections":0,"streams":0,"live_tasks":0,'
    '"queued_bytes":0,"kept_hours":0,"kept_bytes":0},"agents":1}'
)
TENANT_USE = TenantUse(
    concurrency=LimitUse(1, 2),
    requests=LimitUse(0, 0),
    connections=LimitUse(3, 4),
    streams=LimitUse(0, 512),
    live_tasks=LimitUse(5, 6),
    queued_bytes=LimitUse(7, 8),
    kept_bytes=LimitUse(None, 0),
    files=LimitUse(9, 10),
    file_bytes=LimitUse(11, 12),
)
TENANT_USE_JSON = (
    '{"concurrency":{"used":1,"most":2},"requests":{"used":0,"most":0},"connections":{"used":3,"most":4},'
    '"streams":{"used":0,"most":512},"live_tasks":{"used":5,"most":6},"queued_bytes":{"used":7,"most":8},'
    '"kept_bytes":{"used":null,"most":0},"files":{"used":9,"most":10},"file_bytes":{"used":11,"most":12}}'
)
AGENT = AgentShown.of(
    CatalogueAgent(
        tenant="acme",
        definition=AgentDefinition(id="bob", role="r", advisor=Advisor(model="m")),
        created_at_ms=1,
        updated_at_ms=2,
    )
)
AGENT_JSON = (
    '{"id":"bob","name":"","role":"r","kind":"model","model":"","source":"stored",'
    '"created_at_ms":1,"updated_at_ms":2,"agent_def":{"id":"bob","name":"","role":"r","personality":"","goal":"",'
    '"description":"","rules":[],"capabilities":[],"event_types":[],"model":"","fallback_models":[],'
    '"max_tokens":1024,"temperature":0.3,"brevity":"full","mode":"","channel":null,'
    '"advisor":{"model":"m","fallback_models":[],"prompt":"","mode":"consult","max_redirects":2,"malformed_halts":true},'
    '"memory":{"search_expand":false,"auto_tag":false,"auto_supersede":false,"intent_routing":true,'
    '"age_decay":true,"age_half_life_days":90.0,"age_floor":0.5},'
    '"intent":{"mode":"off","min_confidence":0.8,"apply_routing":true,"model":""},"kind":"model",'
    '"default_project":"","mcp_tool_permissions":null,"needs_approval":[],"timeout_ms":null,"idempotent":false,"on_lost":"hold",'
    '"input_modes":[],"output_modes":[],"command":[],"url":"","peer":"","skills":[],"extensions":[],"concurrency":0,'
    '"rate_per_min":0,'
    '"schedules":[],"retries":null},'
    '"ignored":[]}'
)

SCHEDULE = ScheduleShown(
    agent_id="bob",
    id="daily",
    cron="0 9 * * *",
    every_s=0,
    time_zone="Europe/Berlin",
    text="hi",
    catch_up_s=60,
    source="stored",
    paused_at_ms=None,
    upcoming=(Moment(1, "1970-01-01T01:00:00+01:00"),),
)
SCHEDULE_JSON = (
    '{"agent_id":"bob","id":"daily","cron":"0 9 * * *","every_s":0,"time_zone":"Europe/Berlin","text":"hi",'
    '"catch_up_s":60,"source":"stored","paused_at_ms":null,'
    '"upcoming":[{"at_ms":1,"local":"1970-01-01T01:00:00+01:00"}]}'
)
PUSH = PushShown(
    task_id=TaskId("t"),
    push_id="p",
    agent="bob@x",
    host="hooks.example",
    made_at_ms=1,
    moved_at_ms=2,
    delivered=3,
    attempts=1,
    state="failing",
    next_ms=4,
    failure="HTTP 500",
)
PUSH_JSON = (
    '{"task_id":"t","push_id":"p","agent":"bob@x","host":"hooks.example","made_at_ms":1,"moved_at_ms":2,'
    '"delivered":3,"attempts":1,"state":"failing","next_ms":4,"failure":"HTTP 500"}'
)

GOLDEN: list[tuple[ApiAnswer, str]] = [
    (ErrorAnswer(code="stale_lease", message="m"), '{"kind":"error","code":"stale_lease","message":"m"}'),
    (
        error_of(OverLimit("queue_full", "m", retry_after_ms=1_000)),
        '{"kind":"error","code":"queue_full","message":"m","retry_after_ms":1000}',
    ),
    (TaskQueued(task_id=T), '{"kind":"a2a_task_queued","task_id":"t-1"}'),
    (
        TaskQueued(task_id=T, duplicate=True, replayed=True, following=T2),
        '{"kind":"a2a_task_queued","task_id":"t-1","duplicate":true,"replayed":true,"following":"t-2"}',
    ),
    (TaskOpt(task=None, lease=None, tasks=()), '{"kind":"a2a_task_opt","task":null,"lease":null,"tasks":[]}'),
    (
        TaskOpt(task=TASK, lease=LEASE, tasks=(LeasedShown(TASK, LEASE),)),
        (
            f'{{"kind":"a2a_task_opt","task":{TASK_JSON},"lease":{LEASE_JSON},'
            f'"tasks":[{{"task":{TASK_JSON},"lease":{LEASE_JSON}}}]}}'
        ),
    ),
    (Tasks(tasks=(FULL,)), f'{{"kind":"a2a_tasks","tasks":[{FULL_JSON}]}}'),
    (Tasks(tasks=(), truncated=True), '{"kind":"a2a_tasks","tasks":[],"truncated":true}'),
    (ResultPosted(task_id=T), '{"kind":"a2a_result_posted","task_id":"t-1"}'),
    (
        ResultPosted(task_id=T, duplicate=True),
        '{"kind":"a2a_result_posted","task_id":"t-1","duplicate":true}',
    ),
    (ResultOpt(result=None, results=()), '{"kind":"a2a_result_opt","result":null,"results":[]}'),
    (
        ResultOpt(result=OK, results=(OK,)),
        f'{{"kind":"a2a_result_opt","result":{OK_JSON},"results":[{OK_JSON}]}}',
    ),
    (Results(results=(error_result(T, "no"),)), f'{{"kind":"a2a_results","results":[{ERROR_JSON}]}}'),
    (
        QueueShown(
            tasks=(
                QueueEntry(state="queued", task=TASK, attempt=0, created_at_ms=3),
                QueueEntry(
                    state="in_flight",
                    task=TASK,
                    attempt=2,
                    created_at_ms=4,
                    lease_id=L,
                    leased_to=BOB,
                    leased_at_ms=5,
                    renewed_at_ms=6,
                    holder_lost=True,
                ),
            ),
            results=(OK,),
        ),
        (
            f'{{"kind":"a2a_queue","tasks":[{{"state":"queued","task":{TASK_JSON},"attempt":0,"created_at_ms":3}},'
            f'{{"state":"in_flight","task":{TASK_JSON},"attempt":2,"created_at_ms":4,"lease_id":"l-1",'
            '"leased_to":{"display":"bob@x","pubkey":"B"},"leased_at_ms":5,"renewed_at_ms":6,"holder_lost":true}],'
            f'"results":[{OK_JSON}]}}'
        ),
    ),
    (
        QueueShown(tasks=(), results=(), next="0f"),
        '{"kind":"a2a_queue","tasks":[],"results":[],"next":"0f"}',
    ),
    (
        LeaseRenewedAnswer(task_id=T, lease=LEASE),
        f'{{"kind":"a2a_lease_renewed","task_id":"t-1","lease":{LEASE_JSON}}}',
    ),
    (LeaseReleasedAnswer(task_id=T), '{"kind":"a2a_lease_released","task_id":"t-1"}'),
    (
        RequestWithdrawnAnswer(request_id="r-1", leases=1, results=0),
        '{"kind":"a2a_request_withdrawn","request_id":"r-1","leases":1,"results":0}',
    ),
    (TaskUpdatedAnswer(task_id=T, generation=3), '{"kind":"a2a_task_updated","task_id":"t-1","generation":3}'),
    (
        TaskUpdatedAnswer(task_id=T, generation=3, duplicate=True),
        '{"kind":"a2a_task_updated","task_id":"t-1","generation":3,"duplicate":true}',
    ),
    (
        TaskCanceled(task_id=T, canceled=False, ending=Ending.COMPLETED, result=OK),
        f'{{"kind":"a2a_task_canceled","task_id":"t-1","canceled":false,"ending":"completed","result":{OK_JSON}}}',
    ),
    (
        TaskShown(
            task=TASK,
            state="queued",
            a2a_state="submitted",
            attempt=1,
            turn=1,
            generation=2,
            created_at_ms=3,
            updated_at_ms=4,
            leases=(LeaseRecord(lease_id=L, leased_to=BOB, leased_at_ms=5, turn=1, attempt=1),),
            updates=(UpdateRecord(generation=1, kind="submitted", ts_ms=3, body=None),),
            result=None,
            cause=None,
            holder_lost=False,
        ),
        (
            f'{{"kind":"a2a_task","task":{TASK_JSON},"state":"queued","a2a_state":"submitted","attempt":1,"turn":1,'
            '"generation":2,"created_at_ms":3,"updated_at_ms":4,"leases":[{"lease_id":"l-1",'
            '"leased_to":{"display":"bob@x","pubkey":"B"},"leased_at_ms":5,"turn":1,"attempt":1,"ended_at_ms":null,'
            '"outcome":null,"reason":null}],"updates":[{"generation":1,"kind":"submitted","ts_ms":3,"body":null}],'
            '"result":null,"cause":null,"holder_lost":false}'
        ),
    ),
    (
        TaskLogShown(
            task_id=T,
            lines=(
                LogLine(no=7, ts_ms=3, writer="agent", stream="stdout", level="info", text="hi"),
                LogLine(
                    no=8,
                    ts_ms=3,
                    writer="daemon",
                    stream="log",
                    level="warning",
                    text="agent.failed",
                    attempt=1,
                    logger="l",
                    fields={"a": "b"},
                    traceback="t",
                ),
            ),
            next=8,
            ended=True,
            left_out=2,
        ),
        (
            '{"kind":"a2a_task_log","task_id":"t-1","lines":[{"no":7,"ts_ms":3,"writer":"agent","stream":"stdout",'
            '"level":"info","text":"hi"},{"no":8,"ts_ms":3,"writer":"daemon","stream":"log","level":"warning",'
            '"text":"agent.failed","attempt":1,"logger":"l","fields":{"a":"b"},"traceback":"t"}],"next":8,"ended":true,'
            '"left_out":2}'
        ),
    ),
    (
        TreeShown(tree=TreeNode(task_id=T, task=None, state=None)),
        (
            '{"kind":"a2a_tree","tree":{"task_id":"t-1","task":null,"state":null,"attempt":0,"created_at_ms":null,'
            '"updated_at_ms":null,"result_status":null,"children":[]}}'
        ),
    ),
    (
        Found(tasks=(), next=None, total=None),
        '{"kind":"a2a_found","tasks":[],"next":null,"total":null}',
    ),
    (
        Found(
            tasks=(
                FoundTask(
                    task_id=T,
                    parent=None,
                    context_id=None,
                    tenant=None,
                    agent="bob@x",
                    sender="alice@x",
                    task_kind=None,
                    key=None,
                    origin="mailbox",
                    state="queued",
                    a2a_state="submitted",
                    attempt=0,
                    created_at_ms=3,
                    updated_at_ms=4,
                    deadline_ms=None,
                    outcome=None,
                    cause=None,
                    lease_id=None,
                    leased_to=None,
                    leased_at_ms=None,
                    holder_lost=False,
                    intent="do it",
                    error_message=None,
                    remote=False,
                ),
            ),
            next="c3-1",
            total=100_000,
            at_least=True,
        ),
        (
            '{"kind":"a2a_found","tasks":[{"task_id":"t-1","parent":null,"context_id":null,"tenant":null,'
            '"agent":"bob@x","sender":"alice@x","task_kind":null,"key":null,"origin":"mailbox","state":"queued",'
            '"a2a_state":"submitted","attempt":0,"created_at_ms":3,"updated_at_ms":4,"deadline_ms":null,'
            '"outcome":null,"cause":null,"lease_id":null,"leased_to":null,"leased_at_ms":null,"holder_lost":false,'
            '"intent":"do it","error_message":null,"remote":false}],"next":"c3-1","total":100000,"at_least":true}'
        ),
    ),
    (
        Counted(lanes=LaneCounts(queued=2), by_agent=(AgentLanes(agent="bob@x", tenant=None, queued=2),)),
        (
            '{"kind":"a2a_counts","lanes":{"queued":2,"in_flight":0,"parked":0,"following":0,"result_pending":0,'
            '"failed":0,"done":0},"by_agent":[{"queued":2,"in_flight":0,"parked":0,"following":0,'
            '"result_pending":0,"failed":0,"done":0,"agent":"bob@x","tenant":null}],"holders_lost":0}'
        ),
    ),
    (
        RepairedTasks(
            dry_run=False,
            matched=2,
            applied=1,
            outcomes=(
                BulkOutcome(task_id=T, state="in_flight", outcome="applied"),
                BulkOutcome(task_id=T, state="queued", outcome="refused", code="not_leased", reason="it is queued"),
            ),
            more=True,
        ),
        (
            '{"kind":"a2a_bulk","dry_run":false,"matched":2,"applied":1,"outcomes":[{"task_id":"t-1",'
            '"state":"in_flight","outcome":"applied"},{"task_id":"t-1","state":"queued","outcome":"refused",'
            '"code":"not_leased","reason":"it is queued"}],"more":true}'
        ),
    ),
    (
        Repaired(outcome=RepairOutcome(task_id=T, action="requeued", state="queued", attempt=1)),
        '{"kind":"a2a_repaired","outcome":{"task_id":"t-1","action":"requeued","state":"queued","attempt":1}}',
    ),
    (
        Repaired(
            outcome=RepairOutcome(
                task_id=T, action="forced_error", state="result_pending", attempt=1, result=error_result(T, "no")
            )
        ),
        (
            '{"kind":"a2a_repaired","outcome":{"task_id":"t-1","action":"forced_error","state":"result_pending",'
            f'"attempt":1,"result":{ERROR_JSON}}}}}'
        ),
    ),
    (
        AutoRetried(
            report=RetryReport(
                policy=RetryPolicy(),
                considered=2,
                requeued=(Requeued(task_id=T, lease_id=L, attempt=1, idempotency_key="k"),),
                skipped=(
                    Skipped(task_id=T2, reason=SkipReason.LEASE_TOO_YOUNG, attempt=1, lease_age_ms=7),
                    Skipped(task_id=T2, reason=SkipReason.MISSING_LEASE, attempt=1),
                ),
            )
        ),
        (
            '{"kind":"a2a_auto_retried","report":{"policy":{"enabled":false,"min_lease_age_ms":300000,"max_attempts":3,'
            '"max_requeues":1,"scan_limit":100},"considered":2,'
            '"requeued":[{"task_id":"t-1","lease_id":"l-1","attempt":1,"idempotency_key":"k"}],'
            '"skipped":[{"task_id":"t-2","reason":"lease_too_young","attempt":1,"lease_age_ms":7},'
            '{"task_id":"t-2","reason":"missing_lease","attempt":1}],"would_requeue":[]}}'
        ),
    ),
    (CompactedAnswer(dropped=4), '{"kind":"a2a_compacted","dropped":4}'),
    (
        IdentityEnrolledAnswer(
            display="bob@x", pubkey_b58=BOB.pubkey, token_b58="tok", granted=(GrantedAction("a2a.send.x@y", "s"),)
        ),
        (
            '{"kind":"identity_enrolled","display":"bob@x","pubkey_b58":"B","token_b58":"tok",'
            '"granted":[{"action":"a2a.send.x@y","signature_b58":"s"}]}'
        ),
    ),
    (
        IdentityList(
            identities=(
                IdentityShown(agent_id=BOB, token_prefix="abc", registered_at=1, revoked_at=None, operator=False),
            ),
            operator_pubkey_b58=ALICE.pubkey,
            truncated=False,
        ),
        (
            '{"kind":"identity_list","identities":[{"agent_id":{"display":"bob@x","pubkey":"B"},"token_prefix":"abc",'
            '"registered_at":1,"revoked_at":null,"operator":false}],"operator_pubkey_b58":"A","truncated":false}'
        ),
    ),
    (
        IdentityRevokedAnswer(display="bob@x", pubkey_b58=BOB.pubkey, token_prefix="abc", revoked_at=2),
        '{"kind":"identity_revoked","display":"bob@x","pubkey_b58":"B","token_prefix":"abc","revoked_at":2}',
    ),
    (
        TokenRotated(display="bob@x", token_b58="tok"),
        '{"kind":"token_rotated","display":"bob@x","token_b58":"tok"}',
    ),
    (IdentitiesPurgedAnswer(before_ms=1, purged=2), '{"kind":"identities_purged","before_ms":1,"purged":2}'),
    (
        CapabilityGranted(
            subject_display="bob@x", action="a2a.compact", signature_b58="s", scope=msgspec.Raw(b"{}"), expires_at=None
        ),
        (
            '{"kind":"capability_granted","subject_display":"bob@x","action":"a2a.compact","signature_b58":"s",'
            '"scope":{},"expires_at":null}'
        ),
    ),
    (
        CapabilityList(
            limit=10,
            capabilities=(
                CapabilityShown(
                    signature_b58="s",
                    subject=BOB,
                    action="a2a.compact",
                    scope=msgspec.Raw(b'{"max_uses":2}'),
                    granted_by=ALICE,
                    granted_at=1,
                    expires_at=None,
                    revoked_at=None,
                    effective="live",
                    budget=GrantBudget(2, 1, 1),
                ),
            ),
        ),
        (
            '{"kind":"capability_list","limit":10,"capabilities":[{"signature_b58":"s",'
            '"subject":{"display":"bob@x","pubkey":"B"},"action":"a2a.compact","scope":{"max_uses":2},'
            '"granted_by":{"display":"alice@x","pubkey":"A"},"granted_at":1,"expires_at":null,"revoked_at":null,'
            '"effective":"live","budget":{"max_uses":2,"used":1,"remaining":1}}]}'
        ),
    ),
    (
        CapabilityRevoked(signature_b58="s", removed=True),
        '{"kind":"capability_revoked","signature_b58":"s","removed":true}',
    ),
    (CapabilitiesPurged(before_ms=1, purged=2), '{"kind":"capabilities_purged","before_ms":1,"purged":2}'),
    (
        AuditRecent(limit=20, since_ms=None, events=(msgspec.Raw(b'{"id":"e", "kind":{}}'),), next=7),
        '{"kind":"audit_recent","limit":20,"since_ms":null,"events":[{"id":"e", "kind":{}}],"next":7}',
    ),
    (
        AuditIntegrity(report=AuditReport(events=1, anchors=1, valid=True, root_hash_hex="00")),
        '{"kind":"audit_integrity","report":{"events":1,"anchors":1,"valid":true,"root_hash_hex":"00","failures":[]}}',
    ),
    (
        LoginCodeAnswer(code="c", url="http://h/ui/code#c", lasts_ms=60_000),
        '{"kind":"login_code","code":"c","url":"http://h/ui/code#c","lasts_ms":60000}',
    ),
    (AnsweredTask(task_id=TaskId("t")), '{"kind":"a2a_answered","task_id":"t"}'),
    (AnsweredTask(task_id=TaskId("t"), duplicate=True), '{"kind":"a2a_answered","task_id":"t","duplicate":true}'),
    (SignaledTask(task_id=TaskId("t")), '{"kind":"a2a_signaled","task_id":"t"}'),
    (AuditPurgedAnswer(before_ms=1, purged=2), '{"kind":"audit_purged","before_ms":1,"purged":2}'),
    (
        ProtocolInfo(info=ProtocolVersions(), server="covenant/1"),
        (
            '{"kind":"protocol_info","info":{"protocol":"covenant.ipc","version":1,"min_supported":1,"max_supported":1},'
            '"server":"covenant/1"}'
        ),
    ),
    (
        BackupBegun(id="b", folder="home/backups/b", position=7, incarnation="original", made_at_ms=1),
        (
            '{"kind":"backup_begun","id":"b","folder":"home/backups/b","position":7,"incarnation":"original",'
            '"made_at_ms":1}'
        ),
    ),
    (BackupEnded(backup_id="b"), '{"kind":"backup_ended","backup_id":"b"}'),
    (
        DrainProgress(
            draining=True,
            drained=True,
            running=1,
            left_ms=2,
            handed_back=7,
            leased=3,
            queued=4,
            parked=5,
            results=6,
        ),
        (
            '{"kind":"drain_progress","draining":true,"drained":true,"running":1,"left_ms":2,"handed_back":7,"leased":3,"queued":4,"parked":5,'
            '"results":6}'
        ),
    ),
    (
        Attention(
            at_ms=1,
            needs=1,
            items=(Need(what="holder_lost", severity="bad", title="t", detail="d", act={"verb": "v", "href": "h"}),),
            numbers=LaneCounts(queued=2),
        ),
        (
            '{"kind":"a2a_attention","at_ms":1,"needs":1,"items":[{"what":"holder_lost","severity":"bad","title":"t","detail":"d",'
            '"act":{"verb":"v","href":"h"}}],"numbers":{"queued":2,"in_flight":0,"parked":0,"following":0,'
            '"result_pending":0,"failed":0,"done":0}}'
        ),
    ),
    (
        SettingsShown(
            settings=(
                SettingShown(name="a.b", value=1, default=(), source="flag", variable="COVENANT_A_B", meaning="B."),
            )
        ),
        (
            '{"kind":"settings","settings":[{"name":"a.b","value":1,"default":[],"source":"flag",'
            '"variable":"COVENANT_A_B","meaning":"B."}]}'
        ),
    ),
    (
        TenantAdded(tenant=TENANT, token="atr_1"),
        f'{{"kind":"tenant_added","tenant":{TENANT_JSON},"token":"atr_1"}}',
    ),
    (
        TenantList(tenants=(fill(TenantListed, TENANT, use=TENANT_USE),)),
        f'{{"kind":"tenant_list","tenants":[{TENANT_JSON[:-1]},"use":{TENANT_USE_JSON}}}]}}',
    ),
    (TenantChanged(tenant=TENANT), f'{{"kind":"tenant_changed","tenant":{TENANT_JSON}}}'),
    (
        TenantRotated(tenant=TENANT, token="atr_1"),
        f'{{"kind":"tenant_rotated","tenant":{TENANT_JSON},"token":"atr_1"}}',
    ),
    (
        TenantRemovalAnswer(
            name="acme",
            done=True,
            stage="removed",
            tasks=1,
            digest="ab",
            canceled=2,
            agents=3,
            identities=4,
            grants=5,
            pushes=6,
            cached=7,
            places=(SearchedPlace(place="journal", found=8, kept=8),),
            left=0,
            problem="",
        ),
        (
            '{"kind":"tenant_removal","name":"acme","done":true,"stage":"removed","tasks":1,"digest":"ab","canceled":2,'
            '"agents":3,"identities":4,"grants":5,"pushes":6,"cached":7,"places":[{"place":"journal","found":8,'
            '"kept":8}],"left":0,"problem":""}'
        ),
    ),
    (
        TenantTraces(name="acme", places=(SearchedPlace(place="audit", found=1),), left=1),
        '{"kind":"tenant_traces","name":"acme","places":[{"place":"audit","found":1}],"left":1}',
    ),
    (
        AgentList(tenant="acme", count=1, agents=(AGENT,)),
        f'{{"kind":"agent_list","tenant":"acme","count":1,"agents":[{AGENT_JSON}]}}',
    ),
    (
        AgentAdded(tenant="acme", agent=AGENT),
        f'{{"kind":"agent_added","tenant":"acme","agent":{AGENT_JSON}}}',
    ),
    (
        AgentAnswer(tenant="acme", agent=AGENT, identity=BOB),
        f'{{"kind":"agent","tenant":"acme","agent":{AGENT_JSON},"identity":{{"display":"bob@x","pubkey":"B"}}}}',
    ),
    (
        AgentRemovedAnswer(tenant="acme", agent_id="bob"),
        '{"kind":"agent_removed","tenant":"acme","agent_id":"bob"}',
    ),
    (
        ScheduleList(tenant="acme", count=2, schedules=(SCHEDULE,)),
        f'{{"kind":"schedule_list","tenant":"acme","count":2,"schedules":[{SCHEDULE_JSON}]}}',
    ),
    (
        ScheduleAnswer(tenant="acme", schedule=SCHEDULE),
        f'{{"kind":"schedule","tenant":"acme","schedule":{SCHEDULE_JSON}}}',
    ),
    (
        ScheduleRemoved(tenant="acme", agent_id="bob", schedule_id="daily"),
        '{"kind":"schedule_removed","tenant":"acme","agent_id":"bob","schedule_id":"daily"}',
    ),
    (
        ScheduleRun(tenant="acme", agent_id="bob", schedule_id="daily", task_id=TaskId("t")),
        '{"kind":"schedule_run","tenant":"acme","agent_id":"bob","schedule_id":"daily","task_id":"t"}',
    ),
    (
        StoredFileList(
            files=(
                FileShown(sha256="ab", size=1, stored_at_ms=2, references=3, tasks=("t",), url="u"),
                FileShown(sha256="cd", size=1, stored_at_ms=2, references=0, tasks=(), url=None),
            ),
            count=4,
            bytes=5,
            next=None,
            upload_url="http://h/v1/files",
        ),
        (
            '{"kind":"file_list","files":[{"sha256":"ab","size":1,"stored_at_ms":2,"references":3,"tasks":["t"],'
            '"url":"u"},{"sha256":"cd","size":1,"stored_at_ms":2,"references":0,"tasks":[],"url":null}],"count":4,'
            '"bytes":5,"next":null,"upload_url":"http://h/v1/files"}'
        ),
    ),
    (PushList(count=3, dead=1, pushes=(PUSH,)), f'{{"kind":"a2a_pushes","count":3,"dead":1,"pushes":[{PUSH_JSON}]}}'),
    (PushRetried(push=PUSH), f'{{"kind":"a2a_push_retried","push":{PUSH_JSON}}}'),
    (
        NodeList(
            nodes=(LedgerNode(node="n", boot="b", alive=True, left=False, started_at_ms=1, seen_at_ms=2, leases=3),)
        ),
        (
            '{"kind":"node_list","nodes":[{"node":"n","boot":"b","alive":true,"left":false,"started_at_ms":1,"seen_at_ms":2,'
            '"leases":3}]}'
        ),
    ),
    (
        FramesShown(
            task_id=TaskId("t-1"),
            on=True,
            frames=(
                LoggedFrame(at_ms=1, direction="in", door="a2a", what="POST /x", text="{}", headers={"host": "h"}),
                LoggedFrame(at_ms=2, direction="out", door="a2a", what="200", text="", truncated=True),
            ),
            left_out=3,
            lost=4,
        ),
        (
            '{"kind":"a2a_frames","task_id":"t-1","on":true,"frames":[{"at_ms":1,"direction":"in","door":"a2a",'
            '"what":"POST /x","text":"{}","headers":{"host":"h"}},{"at_ms":2,"direction":"out","door":"a2a",'
            '"what":"200","text":"","truncated":true}],"left_out":3,"lost":4}'
        ),
    ),
    (
        AgentCardShown(card={"name": "n"}, raw="{}", signature=CardSignature(state="none", detail="d")),
        '{"kind":"agent_card","card":{"name":"n"},"raw":"{}","signature":{"state":"none","detail":"d"}}',
    ),
    (
        Inspected(
            ok=False,
            interface="http://h/",
            card=None,
            signature=None,
            conversation=(InspectedTurn(role="agent", text="x", state="working", task_id="t"),),
            frames=(InspectedFrame(at_ms=1, direction="in", what="answer", text="{}", status=200, findings=("f",)),),
            findings=(ConformanceFinding(rule="json", text="f", frame=0),),
            took_ms=2,
            error="e",
        ),
        (
            '{"kind":"a2a_inspected","ok":false,"interface":"http://h/","card":null,"signature":null,"conversation":'
            '[{"role":"agent","text":"x","state":"working","task_id":"t"}],"frames":[{"at_ms":1,"direction":"in",'
            '"what":"answer","text":"{}","status":200,"findings":["f"]}],"findings":[{"rule":"json","text":"f",'
            '"frame":0}],"took_ms":2,"error":"e","truncated":false}'
        ),
    ),
    (Authenticated(display="bob@x"), '{"kind":"authenticated","display":"bob@x"}'),
    (AuthenticationFailed(reason="r"), '{"kind":"authentication_failed","reason":"r"}'),
    (Pong(), '{"kind":"pong"}'),
    *PEER_GOLDEN,
]


@pytest.mark.parametrize(
    ("answer", "expected"), GOLDEN, ids=[f"{type(each).__name__}-{n}" for n, (each, _) in enumerate(GOLDEN)]
)
def test_an_answer_is_encoded_to_these_bytes(answer: ApiAnswer, expected: str) -> None:
    assert encode(answer).decode() == expected
    assert encode_legacy(answer).decode() == expected.replace('{"kind":"a2a_', '{"kind":"a2_a_', 1)


def test_every_answer_has_its_golden_bytes() -> None:
    assert {type(answer) for answer, _ in GOLDEN} == set(ApiAnswer.__subclasses__())
