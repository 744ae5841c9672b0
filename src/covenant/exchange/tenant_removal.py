"""Removes a tenant: erases its data, and then searches for traces.

A removal begins with one record; from then on requests with the tenant's token are refused and nothing is accepted for
it. The rest may be interrupted anywhere and begins again, by itself after a start: live tasks are canceled; the data to
erase is recorded, with its digest; registers, tasks, files and freed bytes are erased; every place is searched. When
nothing is left, the tenant's record is removed, and an audit row says what was erased.

A tenant's tasks are those that it or its agents sent, and those that somebody sent to one of its agents. Rows of the
audit stay: its chain needs them, and they hold no content of tasks.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol

import msgspec

from covenant.exchange.access.principals import Principal, require_operator
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.frame_log import FrameLog
from covenant.exchange.request_checks import check_reason
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.task_logs import TaskLogs
from covenant.ledger.contract.identities import Register, RegisterChange
from covenant.ledger.contract.ledger import Ledger, SharedLedger
from covenant.ledger.contract.retention import EraseTasks, SearchedPlace
from covenant.ledger.contract.task_query import PAGE_MAX, FoundTask, TaskQuery
from covenant.ledger.machine.commands import Cancel, Drain, DropPush
from covenant.ledger.machine.decisions.identities import unknown_tenant
from covenant.ledger.machine.identity_commands import BeginTenantRemoval, EraseTenant, FinishTenantRemoval
from covenant.ledger.machine.states import DRAINED, QUERY_STATES, SETTLED, State
from covenant.ledger.register_index import concerns_host
from covenant.model.agent_definition import RESERVED
from covenant.model.errors import Conflict, NotFound, Refusal
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.tenants import Tenant, TenantRemoval, host_of

RETRY_S: Final = 10.0
LATEST_MS: Final = (1 << 62) - 1
REPORTS_MAX: Final = 100
_LIVE: Final = tuple(state for state in State if state not in (SETTLED, DRAINED))

replace = msgspec.structs.replace


class TenantFiles(Protocol):
    """A tenant's files in a home, besides the ledger."""

    def count(self, tenant: str) -> int:
        """The number of the tenant's files."""

    async def erase(self, tenant: str) -> None: ...

    async def followed(self) -> int | None:
        """The version of the registers whose removals have ended here; None in a home that never noted one."""

    async def keep_followed(self, version: int) -> None: ...

    async def search(self, tenant: str, keys: Sequence[str]) -> Sequence[SearchedPlace]:
        """Searches every file of the home, except the ledger's own files."""


class TenantHoldings(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A tenant's data in numbers. `live` counts its tasks that have not ended, by state."""

    live: dict[str, int]
    finished: int
    agents: int
    identities: tuple[str, ...]
    grants: int
    pushes: int
    cached: int
    files: int


class RemovalReport(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The progress of a removal. `problem` says why it does not go on, if it waits for something."""

    done: bool
    stage: str
    removal: TenantRemoval
    places: tuple[SearchedPlace, ...] = ()
    problem: str = ""


class TenantRemovals:
    """`run` at one of the daemons on a ledger, `follow` at each. `run` also continues removals of an earlier run."""

    def __init__(
        self,
        ledger: Ledger,
        catalogue: Catalogue,
        logs: TaskLogs,
        files: TenantFiles,
        operator: AgentId,
        *,
        frames: FrameLog | None = None,
        stored: StoredFiles | None = None,
    ) -> None:
        self._ledger = ledger
        self._catalogue = catalogue
        self._logs = logs
        self._frames = frames
        self._stored = stored
        self._files = files
        self._operator = operator
        self._requested = asyncio.Event()
        self._report_changed = asyncio.Condition()
        self._reports: dict[str, RemovalReport] = {}
        self._begun: dict[str, TenantRemoval] = {}
        self._removed = asyncio.Event()
        self._gone: set[str] = set()
        """Tenants that another daemon removed while this one was up, and that this home may still have files of."""
        self._removing = ""
        """The tenant that is being removed by this daemon."""
        ledger.on_registers(self._changed)

    def _changed(self, change: RegisterChange) -> None:
        tenant = self._ledger.tenant(change.name)
        if change.register is Register.TENANTS and tenant is None:
            if change.name != self._removing:
                self._gone.add(change.name)
            self._removed.set()
        elif change.register is Register.TENANTS and tenant is not None and tenant.removal is not None:
            self._begun[change.name] = tenant.removal
            self._requested.set()

    async def follow(self, ledger: SharedLedger) -> None:
        """Erases what this daemon's home has of tenants that another daemon removed, also while this one was down."""
        while True:
            self._removed.clear()
            version, names = await ledger.removed_tenants(await self._files.followed())
            for name in {*names, *self._gone} - {self._removing}:
                await self._erase_here(name)
                self._gone.discard(name)
                if (removal := self._begun.pop(name, None)) is not None:
                    await self._publish(name, RemovalReport(done=True, stage="removed", removal=removal))
            await self._files.keep_followed(version)
            await self._removed.wait()

    async def _erase_here(self, name: str) -> None:
        if self._ledger.tenant(name) is None or name == self._removing:
            await self._files.erase(name)
        await self._logs.forget_unknown(self._is_known)
        if self._frames is not None:
            await self._frames.forget_unknown()

    async def holdings(self, principal: Principal, name: str) -> TenantHoldings:
        await require_operator(self._ledger, principal, "removing a tenant")
        await self._ledger.durable()
        if self._ledger.tenant(name) is None:
            raise unknown_tenant(name)
        live, finished, keys = dict.fromkeys((*QUERY_STATES,), 0), 0, set(self._own_keys(name))
        async for task in self._tasks(name):
            keys.update(self._keys_of(task, name))
            if QUERY_STATES[task.state] is DRAINED:
                finished += 1
            else:
                live[task.state] += 1
        return TenantHoldings(
            live={state: count for state, count in live.items() if count},
            finished=finished,
            agents=len(self._ledger.agents(name)),
            identities=tuple(sorted({each.display for each in await self._identities(name)})),
            grants=await self._grants(name, keys),
            pushes=len(await self._pushes(name)),
            cached=len(await self._ledger.cached_keys(tuple(keys))),
            files=self._files.count(name),
        )

    async def begin(self, principal: Principal, name: str, reason: str, *, cancel_live: bool) -> None:
        """Begins a removal; durable when it returns. A repeat continues it at once."""
        await require_operator(self._ledger, principal, "removing a tenant")
        check_reason(reason, "removal")
        if host_of(principal.agent.display) == name:
            raise Conflict(
                "tenant_of_operator",
                f"the operator {principal.agent.display} belongs to the tenant {name!r}, and would be erased with it",
            )
        if any(peer.tenant == name for peer in self._ledger.peers()):
            raise Conflict(
                "tenant_has_peers", f"peers belong to the tenant {name!r}; `covenant peers remove` them first"
            )
        if not cancel_live:
            await self._check_idle(name)
        await self._ledger.commit(
            BeginTenantRemoval(by=principal.agent, name=name, reason=reason, cancel_live=cancel_live)
        )
        self._reports.pop(name, None)
        self._requested.set()

    async def report(self, principal: Principal, name: str, timeout_s: float) -> RemovalReport:
        """The progress of a removal when it has ended or cannot go on, or after the timeout."""
        await require_operator(self._ledger, principal, "removing a tenant")
        try:
            async with asyncio.timeout(timeout_s), self._report_changed:
                while not ((known := self._reports.get(name)) is not None and (known.done or known.problem)):
                    await self._report_changed.wait()
        except TimeoutError:
            pass
        known = self._reports.get(name)
        if known is not None:
            return known
        tenant = self._ledger.tenant(name)
        if tenant is None or tenant.removal is None:
            raise NotFound("no_removal", f"no removal of {name[:80]!r} is known; finished removals are in the audit")
        return RemovalReport(done=False, stage="begun", removal=tenant.removal)

    async def search(self, principal: Principal, name: str) -> tuple[SearchedPlace, ...]:
        """Searches for the traces of a tenant, whether it exists or was removed."""
        await require_operator(self._ledger, principal, "searching for a tenant")
        tenant = self._ledger.tenant(name)
        keys = {*self._own_keys(name), *(each.pubkey for each in await self._identities(name))}
        if tenant is not None and tenant.removal is not None:
            keys.update(tenant.removal.keys)
        return await self._search(name, tuple(sorted(keys)))

    async def run(self) -> None:
        while True:
            self._requested.clear()
            for tenant in await self._ledger.tenants():
                if tenant.removal is not None:
                    await self._remove_or_report(tenant)
            try:
                async with asyncio.timeout(RETRY_S):
                    await self._requested.wait()
            except TimeoutError:
                continue

    async def _remove_or_report(self, tenant: Tenant) -> None:
        self._removing = tenant.name
        try:
            await self._remove(tenant)
        except Refusal as refusal:
            assert tenant.removal is not None
            now = self._ledger.tenant(tenant.name)
            if now is None:
                return  # another daemon on this ledger has finished it
            before = self._reports.get(tenant.name)
            stage, places = (before.stage, before.places) if before is not None else ("begun", ())
            report = RemovalReport(
                done=False, stage=stage, removal=now.removal or tenant.removal, places=places, problem=refusal.message
            )
            await self._publish(tenant.name, report)
        finally:
            self._removing = ""

    async def _remove(self, tenant: Tenant) -> None:
        name, removal = tenant.name, tenant.removal
        assert removal is not None
        if not removal.digest:
            await self._publish_stage(name, "canceling live tasks", removal)
            canceled = await self._end_tasks(name, removal)
            await self._publish_stage(name, "writing down what there is", removal)
            removal = await self._measure(name, replace(removal, canceled=removal.canceled + canceled))
            cached = tuple(await self._ledger.cached_keys(removal.keys))
            removal = replace(removal, cached=len(cached))
            await self._drop_pushes(name)
            await self._ledger.commit(EraseTenant(by=self._operator, name=name, removal=removal, cached=cached))
        await self._publish_stage(name, "erasing tasks", removal)
        await self._erase_tasks(name, removal)
        await self._publish_stage(name, "erasing files", removal)
        if self._stored is not None:
            for account in (name, *(f"@{key}" for key in removal.keys)):
                await self._stored.erase(account)
        await self._erase_here(name)
        await self._publish_stage(name, "rewriting what has its bytes", removal)
        await self._ledger.scrub(name, removal.keys)
        await self._publish_stage(name, "searching", removal)
        places = await self._search(name, removal.keys)
        left = [place for place in places if place.left]
        if left:
            listed = ", ".join(f"{place.place} ({place.left})" for place in left[:10])
            await self._publish(name, RemovalReport(done=False, stage="searching", removal=removal, places=places))
            raise Conflict(
                "traces_left", f"traces are left in {listed}; the removal goes on by itself when they are gone"
            )
        await self._ledger.commit(FinishTenantRemoval(by=self._operator, name=name, places=len(places)))
        await self._ledger.compact()
        self._begun.pop(name, None)
        await self._publish(name, RemovalReport(done=True, stage="removed", removal=removal, places=places))

    async def _publish_stage(self, name: str, stage: str, removal: TenantRemoval) -> None:
        await self._publish(name, RemovalReport(done=False, stage=stage, removal=removal))

    async def _publish(self, name: str, report: RemovalReport) -> None:
        async with self._report_changed:
            self._reports.pop(name, None)
            self._reports[name] = report
            while len(self._reports) > REPORTS_MAX:
                del self._reports[next(iter(self._reports))]
            self._report_changed.notify_all()

    async def _check_idle(self, name: str) -> None:
        """Refuses with the list of live tasks, which a removal would cancel."""
        counted: dict[str, int] = {}
        async for task in self._tasks(name, _LIVE):
            counted[f"{task.state} at {task.agent}"] = counted.get(f"{task.state} at {task.agent}", 0) + 1
        if counted:
            listed = ", ".join(f"{count} {what}" for what, count in sorted(counted.items())[:10])
            raise Conflict(
                "tenant_at_work",
                f"tasks of {name} have not ended: {listed}; with `cancel_live` (`--cancel-live`) they are canceled",
            )

    async def _end_tasks(self, name: str, removal: TenantRemoval) -> int:
        """Cancels live tasks, and drains results that nobody will fetch."""
        canceled = 0
        while found := [task async for task in self._tasks(name, (*_LIVE, SETTLED))]:
            for task in found:
                if QUERY_STATES[task.state] is SETTLED:
                    await self._ledger.commit(Drain(by=self._operator, sender=None, task_id=task.task_id))
                else:
                    await self._ledger.commit(Cancel(task_id=task.task_id, by=self._operator, reason=removal.reason))
                    canceled += 1
        return canceled

    async def _measure(self, name: str, removal: TenantRemoval) -> TenantRemoval:
        keys, task_ids = set(self._own_keys(name)), list[str]()
        async for task in self._tasks(name):
            task_ids.append(task.task_id)
            keys.update(self._keys_of(task, name))
        identities = await self._identities(name)
        keys.update(each.pubkey for each in identities)
        lines = "".join(f"{task_id}\n" for task_id in sorted(task_ids))
        return replace(
            removal,
            tasks=len(task_ids),
            digest=hashlib.sha256(lines.encode()).hexdigest(),
            agents=len(self._ledger.agents(name)),
            identities=len(identities),
            grants=await self._grants(name, keys),
            pushes=len(await self._pushes(name)),
            keys=tuple(sorted(keys)),
        )

    async def _erase_tasks(self, name: str, removal: TenantRemoval) -> None:
        for tenant, parties in ((name, ()), ("", removal.keys)):
            which = EraseTasks(tenant=tenant, before_ms=LATEST_MS, wholly=True, parties=parties)
            while (erased := await self._ledger.erase_tasks(which)).more:
                which = replace(which, after_ms=erased.after_ms, after_no=erased.after_no)
        for task in (await self._ledger.find(TaskQuery(tenant=name, limit=1))).tasks:
            raise Conflict("tasks_left", f"task {task.task_id} could not be erased: it is {task.state}")

    async def _search(self, name: str, keys: Sequence[str]) -> tuple[SearchedPlace, ...]:
        places = (*await self._ledger.search(name, keys), *await self._files.search(name, keys))
        if self._stored is None:
            return places
        left = [(await self._stored.usage(account)).files for account in (name, *(f"@{key}" for key in keys))]
        return (*places, SearchedPlace(place="files", found=sum(left)))

    async def _tasks(self, name: str, states: tuple[State, ...] = ()) -> AsyncIterator[FoundTask]:
        """The tenant's tasks, and those without a tenant that one of its displays has sent or received.

        All tasks are searched: the name of an agent that was removed long ago is nowhere else.
        """
        query = TaskQuery(states=states, ascending=True, limit=PAGE_MAX)
        while True:
            page = await self._ledger.find(query)
            for task in page.tasks:
                if task.tenant == name or (task.tenant is None and name in map(host_of, (task.agent, task.sender))):
                    yield task
            if page.next is None:
                return
            query = replace(query, after=page.next)

    async def _is_known(self, task_id: TaskId) -> bool:
        return await self._ledger.parties(task_id) is not None

    async def _identities(self, name: str) -> Sequence[AgentId]:
        return [each.agent for each in await self._ledger.identities() if host_of(each.agent.display) == name]

    async def _grants(self, name: str, keys: set[PublicKey]) -> int:
        return sum(concerns_host(grant, name, keys) for grant in await self._ledger.grants())

    async def _pushes(self, name: str) -> Sequence[tuple[TaskId, str]]:
        return [
            (each.task_id, each.id) for each in await self._ledger.outbox() if host_of(each.recipient.display) == name
        ]

    async def _drop_pushes(self, name: str) -> None:
        for task_id, push_id in await self._pushes(name):
            await self._ledger.commit(DropPush(task_id=task_id, id=push_id))

    def _own_keys(self, name: str) -> list[PublicKey]:
        ids = {*RESERVED, *(agent.id for agent in self._catalogue.agents(name))}
        return [self._catalogue.identity(name, each).pubkey for each in ids]

    def _keys_of(self, task: FoundTask, name: str) -> list[PublicKey]:
        """The keys of the tenant's agents and callers in a task, removed ones too: a display leads to its key."""
        parts = (display.rpartition("@") for display in (task.agent, task.sender))
        return [self._catalogue.identity(name, agent_id).pubkey for agent_id, _, host in parts if host == name]


class RemovalFollower:
    """Runs `TenantRemovals.follow` at each daemon on a shared ledger."""

    def __init__(self, removals: TenantRemovals, ledger: SharedLedger) -> None:
        self._removals = removals
        self._ledger = ledger

    async def run(self) -> None:
        await self._removals.follow(self._ledger)
