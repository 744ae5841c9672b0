"""The tools of an agent that a model plays: other agents, agents elsewhere, MCP servers, pages, memory, files.

What an agent may use is decided here, when a tool is called, and not by what the model was told: a tool that its
constitution does not allow, or that is not configured, does nothing, whoever asks for it.

Results are text (see `framing`). One that begins with `ERR:` failed. Each use leaves an artifact `<task>-tool-<n>`, and
each answer of another agent one `<task>-sub-<n>`. An agent elsewhere is sent the text of the message and nothing else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from covenant.agents.agent_directory import AgentDirectory, RemoteCardEntry, describe_card, list_remotes
from covenant.agents.model.agent_memory import AgentMemories, AgentMemory, MemoryNote
from covenant.agents.model.mcp_tools import McpTools
from covenant.agents.model.tool_specs import (
    BY_NAME,
    RESULT_BYTES_MAX,
    SHARED_BYTES_MAX,
    TOOL_SPECS,
    TRUNCATED,
    AdviseArgs,
    AgentArgs,
    Args,
    ClearArgs,
    FetchArgs,
    McpArgs,
    NoArgs,
    NoteArgs,
    NoteIdArgs,
    ParallelArgs,
    RemoteArgs,
    RemoteCallArgs,
    SearchArgs,
    ServerArgs,
    ToolSpec,
    WriteArgs,
    cut,
    framed,
    label,
    plain,
)
from covenant.agents.model.web_fetch import WebPages
from covenant.agents.remote_agent import NOT_ASKED
from covenant.agents.runtime import turn_output as saying
from covenant.agents.runtime.agent_calls import Answer, Call, CallLimit
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.turn_output import TurnOutput
from covenant.exchange.skills import MCP, usable
from covenant.model.agent_definition import INDEX, AgentDefinition
from covenant.model.content import Content, Text
from covenant.model.errors import CovenantError
from covenant.model.task_view import Artifact
from covenant.outbound.remote.remote_task import Sendable

ROUNDS_MAX: Final = 6
PAGES_MAX: Final = 3
CONSULTS_MAX: Final = 2
"""Questions to the advisor in one turn."""
FILE_BYTES_MAX: Final = 10 * 1024 * 1024
"""Of all files of a turn."""
FAILURES_MAX: Final = 2
ERR: Final = "ERR: "

_RPC = re.compile(r"(.*) \(JSON-RPC (-?\d+)\)", re.DOTALL).fullmatch
_HTTP = re.compile(r"(?:the remote refused: )?(.*?) ?\(?HTTP (\d+)\)?", re.DOTALL).fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolServices:
    """What this daemon has for its agents to use. None: not configured."""

    roster: AgentDirectory
    pages: WebPages | None = None
    memories: AgentMemories | None = None
    mcp: McpTools | None = None

    @property
    def abilities(self) -> frozenset[str]:
        """The commands that can be carried out."""
        there = {
            "/agent": True,
            "/parallel": True,
            "/a2a": self.roster.reaches_out,
            MCP: self.mcp is not None,
            "/fetch": self.pages is not None,
            "/mem": self.memories is not None,
            "/write": True,
        }
        return frozenset(command for command, is_there in there.items() if is_there)


class ToolFailed(Exception):
    """A tool did not do what it was asked to; says to the model why."""


async def ask(job: Job, name: str, what: Sendable) -> Answer:
    """Hand something to another agent, as part of this job. Waits where calls may not follow each other so fast."""
    call = Call(agent=name, what=what)
    try:
        return await job.calls.one(call)
    except CallLimit as limit:
        if limit.retry_after_ms is None:
            raise
        await asyncio.sleep(limit.retry_after_ms / 1000)
        return await job.calls.one(call)


def made_by(answer: Answer) -> list[Artifact]:
    """What was made beside the text: its files and data, without the traces of how it came about."""
    return [
        artifact
        for artifact in answer.artifacts
        if artifact.name not in (saying.TOOL_CALL, saying.SUB_AGENT)
        and not all(type(part) is Text and part == Text(part.text) for part in artifact.parts)
    ]


class Toolbox:
    """For one turn of one agent."""

    def __init__(
        self,
        job: Job,
        speech: TurnOutput,
        constitution: AgentDefinition,
        means: ToolServices,
        *,
        remembers: bool = True,
        advise: Callable[[str], Awaitable[str]] | None = None,
        holds_files: bool = False,
    ) -> None:
        """`remembers`: it has a memory of its own. An agent that exists for one request has none.

        `advise`: asks its advisor. `holds_files`: what it writes is given only by `give_files`.
        """
        self._job = job
        self._speech = speech
        self._constitution = constitution
        self._means = means
        self._tenant = job.holder.display.partition("@")[2]
        there = means.abilities
        if not remembers:
            there -= {"/mem"}
        if not means.roster.known(self._tenant):
            there -= {"/a2a"}
        if means.mcp is None or self._tenant not in means.mcp.tenants:
            there -= {MCP}
        if advise is not None:
            there |= {"/advise"}
        self.commands = usable(constitution, there)
        self._round = 0
        self._room = SHARED_BYTES_MAX
        self._pages_left = PAGES_MAX
        self._files_room = FILE_BYTES_MAX
        self._files: dict[str, Content] | None = {} if holds_files else None
        self._advise = advise
        self._consults_left = CONSULTS_MAX
        self._failures: dict[tuple[str, bytes], int] = {}
        self._asking: dict[str, Answer] = {}
        """Agents that wait for an answer to what they asked."""
        self._uses: dict[str, Callable[[Any], Awaitable[str]]] = {
            "agent": self._agent,
            "parallel": self._parallel,
            "a2a_list": self._a2a_list,
            "a2a_card": self._a2a_card,
            "a2a_call": self._a2a_call,
            "mcp_tools": self._mcp_tools,
            "mcp_call": self._mcp_call,
            "fetch": self._fetch,
            "mem_write": self._mem_write,
            "mem_read": self._mem_read,
            "mem_show": self._mem_show,
            "mem_search": self._mem_search,
            "mem_clear": self._mem_clear,
            "advise": self._asked_for_advice,
            "write": self._write,
        }

    @property
    def wares(self) -> list[ToolSpec]:
        """What the model is told of."""
        return [ware for ware in TOOL_SPECS if ware.command in self.commands]

    @property
    def roster(self) -> str:
        local, remote = "/agent" in self.commands or "/parallel" in self.commands, "/a2a" in self.commands
        return self._means.roster.text(self._tenant, without=self._constitution.id, local=local, remote=remote)

    async def use(self, name: str, given: Mapping[str, Any], round_: int) -> str:
        """What the tool says, framed. `round_` counts the model's answers in this turn, from 1."""
        if round_ != self._round:
            self._round, self._room, self._pages_left = round_, SHARED_BYTES_MAX, PAGES_MAX
        ware = BY_NAME.get(name)
        key = (name, msgspec.json.encode(given))
        try:
            if ware is not None and ware.command == "/a2a" and not self._means.roster.known(self._tenant):
                raise ToolFailed("A2A unavailable in this context")
            if ware is None or ware.command not in self.commands:
                raise ToolFailed(f"{name} is not among the tools of this agent")
            if round_ > ROUNDS_MAX:
                raise ToolFailed(
                    f"tools were used in {ROUNDS_MAX} rounds, which is as often as they may be; answer now"
                )
            if self._failures.get(key, 0) >= FAILURES_MAX:
                raise ToolFailed("this failed before, with the same arguments; do something else")
            body, ok = await self._uses[name](_read(ware, given)), True
        except (ToolFailed, CovenantError) as error:
            body, ok = f"{ERR}{error}", False
            self._failures[key] = self._failures.get(key, 0) + 1
        self._speech.tool(label(name, given), ok=ok)
        command = ware.command.removeprefix("/") if ware is not None else name
        told, took = framed(command, name, given, body, self._room)
        self._room -= took
        return told

    # Other agents, here and elsewhere

    async def _agent(self, args: AgentArgs) -> str:
        known = {listed.name for listed in self._means.roster.local(self._tenant)} - {INDEX, self._constitution.id}
        if args.agent not in known:
            raise ToolFailed(
                f"there is no agent {args.agent!r} to call; there are: {', '.join(sorted(known)) or 'none'}"
            )
        return await self._asked(args.agent, args.message)

    async def _asked(self, name: str, message: str) -> str:
        asking = self._asking.pop(name, None)
        if asking is None:
            answer = await ask(self._job, name, message)
        else:
            answer = await self._job.calls.answer(asking, message)
        self._speech.sub(name, self._job.task.depth + 1, answer.text)
        if answer.waits:
            self._asking[name] = answer
            return f"{name} asks: {answer.text}\n(call it again, and it will take your message for the answer)"
        if not answer.ok:
            raise ToolFailed(answer.text or f"{name} failed")
        names = [artifact.name for artifact in made_by(answer) if artifact.name]
        return f"{answer.text}\n(it also made: {', '.join(map(plain, names))})" if names else answer.text

    async def _parallel(self, args: ParallelArgs) -> str:
        async def one(call: AgentArgs) -> str:
            try:
                return await self._agent(call)
            except (ToolFailed, CovenantError) as error:
                return f"{ERR}{error}"

        answers = await asyncio.gather(*(one(call) for call in args.calls))
        share = RESULT_BYTES_MAX // len(answers) - 100
        pairs = zip(args.calls, answers, strict=True)
        return "\n".join(f"[{call.agent}]\n{cut(answer, share)}" for call, answer in pairs)

    async def _a2a_list(self, args: NoArgs) -> str:  # noqa: ARG002
        return list_remotes(self._means.roster.known(self._tenant))

    async def _a2a_card(self, args: RemoteArgs) -> str:
        kept = self._remote(args.name)
        if kept.card is None:
            raise ToolFailed(f"card fetch failed: {kept.trouble}")
        return describe_card(kept.card)

    async def _a2a_call(self, args: RemoteCallArgs) -> str:
        self._remote(args.name)
        try:
            return await self._asked(args.name, args.message)
        except ToolFailed as failed:
            raise ToolFailed(_abroad(str(failed))) from None

    def _remote(self, name: str) -> RemoteCardEntry:
        kept = self._means.roster.known(self._tenant).get(name)
        if kept is None:
            raise ToolFailed(f"unknown remote agent {name!r}; see /a2a list")
        return kept

    # MCP servers

    async def _mcp_tools(self, args: ServerArgs) -> str:
        assert self._means.mcp is not None
        offered = await self._means.mcp.list(self._tenant, self._constitution)
        lines = [
            f"{tool.full_name} — {plain(tool.description)}\n  takes: {plain(schema)}"
            for tool, schema in offered
            if args.server in (None, "", tool.server)
        ]
        return "\n".join(lines) or "no tools"

    async def _mcp_call(self, args: McpArgs) -> str:
        assert self._means.mcp is not None
        mcp, constitution = self._means.mcp, self._constitution
        answer = await mcp.call(self._tenant, constitution, args.server, args.tool, args.arguments)
        if answer.failed:
            raise ToolFailed(answer.text or "the tool failed")
        return f"{answer.text}{TRUNCATED}" if answer.cut else answer.text

    # WebPages

    async def _fetch(self, args: FetchArgs) -> str:
        assert self._means.pages is not None
        if self._pages_left <= 0:
            raise ToolFailed(f"{PAGES_MAX} pages were read in this round, which is as many as may be")
        self._pages_left -= 1
        return await self._means.pages.read(args.url)

    # AgentMemory

    @property
    def _memory(self) -> AgentMemory:
        assert self._means.memories is not None
        return self._means.memories.of(self._tenant, self._constitution.id)

    async def _mem_write(self, args: NoteArgs) -> str:
        note = await self._memory.write(args.text, args.title)
        return f"OK: note {note.id}"

    async def _mem_read(self, args: NoteIdArgs) -> str:
        note = await self._memory.note(args.id)
        return f"{_headline(note)}\n{note.text}"

    async def _mem_show(self, args: NoArgs) -> str:  # noqa: ARG002
        return "\n".join(map(_headline, await self._memory.notes())) or "no notes"

    async def _mem_search(self, args: SearchArgs) -> str:
        found = await self._memory.search(args.query)
        return "\n".join(f"{_headline(note)}\n{note.text}" for note in found) or "no notes match"

    async def _mem_clear(self, args: ClearArgs) -> str:
        return f"OK: {await self._memory.clear(args.id)} forgotten"

    # The advisor

    async def _asked_for_advice(self, args: AdviseArgs) -> str:
        assert self._advise is not None
        if self._consults_left <= 0:
            raise ToolFailed(f"your advisor was asked {CONSULTS_MAX} times in this turn, which is as often as may be")
        self._consults_left -= 1
        return await self._advise(args.question)

    # Files

    def give_files(self) -> None:
        """Those that were held until now."""
        files, self._files = self._files or {}, None
        for file in files.values():
            self._speech.give(file)

    async def _write(self, args: WriteArgs) -> str:
        data = args.content.encode()
        if len(data) > self._files_room:
            raise ToolFailed(f"the files of one turn may have {FILE_BYTES_MAX} bytes together")
        self._files_room -= len(data)
        file = saying.file(args.path, data, media_type="text/plain")
        if self._files is None:
            self._speech.give(file)
        else:
            self._files[args.path] = file
        note = "; it is part of the answer and kept nowhere else" if args.persist else ""
        return f"OK: wrote {args.path}, {len(data)} bytes{note}"


def _read(ware: ToolSpec, given: Mapping[str, Any]) -> Args:
    try:
        return msgspec.convert(dict(given), ware.takes)
    except msgspec.ValidationError as wrong:
        raise ToolFailed(f"usage: {wrong}") from None


def _abroad(said: str) -> str:
    """Why an agent elsewhere could not be asked, in the words of `/a2a`; what it said itself stays as it is."""
    if not said.startswith(NOT_ASKED):
        return said
    why = said.removeprefix(NOT_ASKED)
    if (refused := _RPC(why)) is not None:
        return f"JSON-RPC error {refused[2]}: {refused[1]}"
    if (refused := _HTTP(why)) is not None:
        return f"HTTP {refused[2]}: {refused[1]}"
    return f"transport: {why}"


def _headline(note: MemoryNote) -> str:
    return f"{note.id}: {note.title}"
