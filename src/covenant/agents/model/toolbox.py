"""The tools of a model agent: local agents, remote agents, MCP servers, web pages, memory, files.

Permission is checked at each tool call, not only in the model's instructions. A result is text between `[/command …]`
and `[END …]`; one that begins with `ERR:` failed. A result has at most 16,384 bytes, and the results of one round of
the model 32,768 together. Text inside a result cannot imitate the end of the result.

Each use writes an artifact `<task>-tool-<n>`, and each answer of another agent `<task>-sub-<n>`. A remote agent
receives the text of the message and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Annotated, Any, Final

import msgspec

from covenant.agents.agent_directory import AgentDirectory, RemoteCardEntry
from covenant.agents.model.agent_memory import AgentMemories, AgentMemory, MemoryNote
from covenant.agents.model.child_questions import ChildQuestion, ChildQuestionsRaised, ChildResult, question_of
from covenant.agents.model.mcp_tools import McpTools, is_name
from covenant.agents.model.tool_specs import (
    SHARED_BYTES_MAX,
    TRUNCATED,
    ToolSpec,
    describe_card,
    framed,
    joined,
    label,
    list_remotes,
    one_line,
    specs_of,
    tool,
)
from covenant.agents.model.web_fetch import WebPages, WebSearch
from covenant.agents.runtime import turn_files
from covenant.agents.runtime.agent_calls import Answer, Call, CallLimit
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.turn_output import SUB_AGENT, TOOL_CALL, TurnOutput
from covenant.exchange.cards import ASK, MCP, usable
from covenant.exchange.native import KEPT
from covenant.model.agent_definition import INDEX, AgentDefinition
from covenant.model.content import Content, Resource, is_plain
from covenant.model.errors import CovenantError
from covenant.model.sanitizer import file_name_of
from covenant.model.task import NATIVE
from covenant.model.task_view import Artifact
from covenant.outbound.remote.remote_task import Sendable

ROUNDS_MAX: Final = 6
PAGES_MAX: Final = 3
CONSULTS_MAX: Final = 2
"""The most questions to the advisor in one turn."""
FILE_BYTES_MAX: Final = 10 * 1024 * 1024
"""The most bytes of all files of a turn."""
FAILURES_MAX: Final = 2
PARALLEL_MAX: Final = 16
ERR: Final = "ERR: "

ShortText = Annotated[str, msgspec.Meta(min_length=1, max_length=1_000)]
LongText = Annotated[str, msgspec.Meta(min_length=1, max_length=200_000)]
Url = Annotated[str, msgspec.Meta(min_length=1, max_length=8_192)]
FilePath = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolServices:
    """The services that this daemon offers to its agents. A service that is not configured is None."""

    directory: AgentDirectory
    pages: WebPages | None = None
    memories: AgentMemories | None = None
    mcp: McpTools | None = None
    search: WebSearch | None = None

    @property
    def abilities(self) -> frozenset[str]:
        available = {
            "/agent": True,
            "/parallel": True,
            "/a2a": self.directory.has_remote,
            MCP: self.mcp is not None and bool(self.mcp.tenants),
            "/fetch": self.pages is not None,
            "/search": self.search is not None,
            "/mem": self.memories is not None,
            "/write": True,
            ASK: True,
        }
        return frozenset(command for command, is_available in available.items() if is_available)


class AgentMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    agent: ShortText
    message: LongText


AgentMessages = Annotated[tuple[AgentMessage, ...], msgspec.Meta(min_length=1, max_length=PARALLEL_MAX)]


class ToolFailed(Exception):
    """A tool failed. The message tells the model why."""


async def call_agent(job: Job, name: str, what: Sendable) -> Answer:
    """Calls another agent as part of this job. Waits and retries once if calls come too fast."""
    call = Call(agent=name, what=what)
    try:
        return await job.calls.one(call)
    except CallLimit as limit:
        if limit.retry_after_ms is None:
            raise
        await asyncio.sleep(limit.retry_after_ms / 1000)
        return await job.calls.one(call)


def files_of(answer: Answer) -> list[Artifact]:
    """The files and data of an answer, without the artifacts of tool uses and sub-agents."""
    return [
        artifact
        for artifact in answer.artifacts
        if artifact.name not in (TOOL_CALL, SUB_AGENT) and not all(map(is_plain, artifact.parts))
    ]


class Toolbox:
    def __init__(
        self,
        job: Job,
        output: TurnOutput,
        definition: AgentDefinition,
        services: ToolServices,
        *,
        remembers: bool = True,
        advise: Callable[[str], Awaitable[str]] | None = None,
        hold_files: bool = False,
    ) -> None:
        """`remembers`: whether the agent has a memory. An agent that exists for one request has none.

        `advise`: asks the advisor. `hold_files`: written files are held back until `write_held_files`.
        """
        self._job = job
        self._output = output
        self._definition = definition
        self._services = services
        self._tenant = job.holder.display.partition("@")[2]
        available = services.abilities
        if not remembers:
            available -= {"/mem"}
        if not services.directory.remote_cards(self._tenant):
            available -= {"/a2a"}
        if services.mcp is None or self._tenant not in services.mcp.tenants:
            available -= {MCP}
        if services.search is None or not services.search.serves(self._tenant):
            available -= {"/search"}
        if advise is not None:
            available |= {"/advise"}
        self._native = job.task.origin == NATIVE
        if self._native:
            available |= {"/read", "/list"}
        self.commands = usable(definition, available)
        self._round = 0
        self._result_bytes_left = SHARED_BYTES_MAX
        self._pages_left = PAGES_MAX
        self._file_bytes_left = FILE_BYTES_MAX
        self._kept_files: dict[str, str] = {}
        """This turn's files that are kept in the conversation, by name."""
        self._files: dict[str, Content] | None = {} if hold_files else None
        self._advise = advise
        self._consults_left = CONSULTS_MAX
        self._failures: dict[tuple[str, bytes], int] = {}
        self._waiting: dict[str, Answer] = {}
        """Questions of called agents that the model has not answered yet, by the agent's name."""

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools that the model may use."""
        return [spec for spec in TOOL_SPECS.values() if spec.command in self.commands]

    @property
    def agents(self) -> str:
        """The directory of agents for the model's instructions."""
        local, remote = "/agent" in self.commands or "/parallel" in self.commands, "/a2a" in self.commands
        return self._services.directory.text(self._tenant, without=self._definition.id, local=local, remote=remote)

    def asks_user(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether this is a valid question to the user, which no tool answers."""
        spec = TOOL_SPECS.get(name)
        if spec is None or spec.command != ASK or ASK not in self.commands:
            return False
        question = arguments.get("question")
        return isinstance(question, str) and bool(question.strip())

    def needs_approval(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether a person must approve this use: by the tool's name, its command, or as `server.tool` of MCP."""
        needs, spec = self._definition.needs_approval, TOOL_SPECS.get(name)
        if not needs or spec is None:
            return False
        server, tool = arguments.get("server"), arguments.get("tool")
        named = {name, spec.command, spec.command.removeprefix("/")}
        if name == "mcp_call":
            named |= {f"{server}.{tool}", f"{tool}"}
        return any(each.strip() in named for each in needs)

    async def use(self, name: str, arguments: Mapping[str, Any], round_: int) -> str:
        """Runs a tool; returns its framed result. `round_` counts the model's answers in this turn, from 1."""
        if round_ != self._round:
            self._round, self._result_bytes_left, self._pages_left = round_, SHARED_BYTES_MAX, PAGES_MAX
        spec = TOOL_SPECS.get(name)
        key, began_s = (name, msgspec.json.encode(arguments)), monotonic()
        with self._job.model_calls.watch_tool(self._job, _span_name(spec, arguments)) as use:
            try:
                body, ok = await self._run(spec, name, arguments, key)
            except ChildQuestionsRaised:
                use.deferred = True
                raise
            use.failed = None if ok else "tool_failed"
        self._output.record_tool(label(name, arguments), ok=ok, took_ms=round((monotonic() - began_s) * 1_000))
        command = spec.command.removeprefix("/") if spec is not None else name
        text, took = framed(command, name, arguments, body, self._result_bytes_left)
        self._result_bytes_left -= took
        return text

    async def _run(
        self, spec: ToolSpec | None, name: str, arguments: Mapping[str, Any], key: tuple[str, bytes]
    ) -> tuple[str, bool]:
        """The tool's text, and whether the tool succeeded."""
        try:
            if spec is not None and spec.command == "/a2a" and not self._services.directory.remote_cards(self._tenant):
                raise ToolFailed("A2A unavailable in this context")
            if spec is None or spec.command not in self.commands:
                raise ToolFailed(f"{name} is not among the tools of this agent")
            if self._round > ROUNDS_MAX:
                raise ToolFailed(f"tools may be used in {ROUNDS_MAX} rounds, and all are used up; answer now")
            if self._failures.get(key, 0) >= FAILURES_MAX:
                raise ToolFailed("this call failed before with the same arguments; try something else")
            args = _parse_arguments(spec, arguments)
            return await spec.run(self, **msgspec.structs.asdict(args)), True
        except (ToolFailed, CovenantError) as error:
            self._failures[key] = self._failures.get(key, 0) + 1
            return f"{ERR}{error}", False

    @tool("/agent", "Hand a task to another agent, and get its answer.")
    async def agent(self, agent: ShortText, message: LongText) -> str:
        known = {listed.name for listed in self._services.directory.local(self._tenant)} - {INDEX, self._definition.id}
        if agent not in known:
            raise ToolFailed(f"there is no agent {agent!r}; the agents are: {', '.join(sorted(known)) or 'none'}")
        return await self._call(agent, message)

    async def _call(self, name: str, message: str) -> str:
        question = self._waiting.pop(name, None)
        if question is None:
            answer = await call_agent(self._job, name, message)
        else:
            answer = await self._job.calls.answer(question, message)
        self._output.record_answer(name, self._job.task.depth + 1, answer.text)
        return self._result_text(name, answer)

    def _result_text(self, name: str, answer: Answer) -> str:
        if answer.asks_approval:
            # A model must not approve in place of a person.
            raise ChildQuestionsRaised((question_of(name, answer),))
        if answer.waits:
            self._waiting[name] = answer
            return f"{name} asks: {answer.text}\n(call {name} again; your message will be the answer)"
        if not answer.ok:
            raise ToolFailed(_failure_text(answer) or f"{name} failed")
        names = [artifact.name for artifact in files_of(answer) if artifact.name]
        return f"{answer.text}\n(it also made: {', '.join(map(one_line, names))})" if names else answer.text

    def child_result(self, name: str, answer: Answer) -> ChildResult:
        """The result of a called agent after a person has answered its question."""
        try:
            return ChildResult(name, self._result_text(name, answer), ok=True)
        except ToolFailed as error:
            return ChildResult(name, f"{ERR}{error}", ok=False)

    def resume(
        self, name: str, arguments: Mapping[str, Any], answers: Sequence[str | None], results: Sequence[ChildResult]
    ) -> str:
        """The framed result of a deferred use (`ChildQuestionsRaised`), once all called agents have answered."""
        for result in results:
            self._output.record_answer(result.agent, self._job.task.depth + 1, result.text)
        left = iter(results)
        texts = [text if text is not None else next(left).text for text in answers]
        agents = [str(call.get("agent", "")) for call in arguments.get("calls", ()) if isinstance(call, Mapping)]
        body = joined(agents, texts) if name == "parallel" else texts[0]
        self._output.record_tool(label(name, arguments), ok=all(result.ok for result in results))
        framed_text, _ = framed(TOOL_SPECS[name].command.removeprefix("/"), name, arguments, body, SHARED_BYTES_MAX)
        return framed_text

    @tool("/parallel", f"Hand tasks to up to {PARALLEL_MAX} agents at once, and get all their answers.")
    async def parallel(self, calls: AgentMessages) -> str:
        async def one(call: AgentMessage) -> str | ChildQuestion:
            try:
                return await self.agent(call.agent, call.message)
            except ChildQuestionsRaised as asks:
                return asks.questions[0]
            except (ToolFailed, CovenantError) as error:
                return f"{ERR}{error}"

        answers = await asyncio.gather(*(one(call) for call in calls))
        if questions := [answer for answer in answers if isinstance(answer, ChildQuestion)]:
            raise ChildQuestionsRaised(questions, [answer if isinstance(answer, str) else None for answer in answers])
        return joined([call.agent for call in calls], map(str, answers))

    @tool("/a2a", "List the remote agents.")
    async def a2a_list(self) -> str:
        return list_remotes(self._services.directory.remote_cards(self._tenant))

    @tool("/a2a", "Show a remote agent's card.")
    async def a2a_card(self, name: ShortText) -> str:
        entry = self._remote(name)
        if entry.card is None:
            raise ToolFailed(f"card fetch failed: {entry.error}")
        return describe_card(entry.card)

    @tool("/a2a", "Send a message to a remote agent, and get its answer. It sees this text and nothing else.")
    async def a2a_call(self, name: ShortText, message: LongText) -> str:
        self._remote(name)
        return await self._call(name, message)

    def _remote(self, name: str) -> RemoteCardEntry:
        entry = self._services.directory.remote_cards(self._tenant).get(name)
        if entry is None:
            raise ToolFailed(f"unknown remote agent {name!r}; see /a2a list")
        return entry

    @tool(MCP, "List the tools of the MCP servers, or of one.")
    async def mcp_tools(self, server: str | None = None) -> str:
        assert self._services.mcp is not None
        offered = await self._services.mcp.list(self._tenant, self._definition)
        lines = [
            f"{tool.full_name} — {one_line(tool.description)}\n  takes: {one_line(schema)}"
            for tool, schema in offered
            if server in (None, "", tool.server)
        ]
        return "\n".join(lines) or "no tools"

    @tool(MCP, "Call a tool of an MCP server.")
    async def mcp_call(self, server: ShortText, tool: ShortText, arguments: Mapping[str, Any] = {}) -> str:
        assert self._services.mcp is not None
        mcp, definition = self._services.mcp, self._definition
        answer = await mcp.call(self._tenant, definition, server, tool, arguments)
        if answer.failed:
            raise ToolFailed(answer.text or "the tool failed")
        return f"{answer.text}{TRUNCATED}" if answer.cut else answer.text

    @tool("/fetch", "Read a web address as text.")
    async def fetch(self, url: Url) -> str:
        assert self._services.pages is not None
        self._take_page()
        return await self._services.pages.read(url)

    def _take_page(self) -> None:
        if self._pages_left <= 0:
            raise ToolFailed(f"at most {PAGES_MAX} pages may be read in one round")
        self._pages_left -= 1

    @tool("/search", "Search the web.")
    async def search(self, query: ShortText) -> str:
        assert self._services.search is not None
        self._take_page()
        return await self._services.search.find(self._tenant, query)

    @property
    def _memory(self) -> AgentMemory:
        assert self._services.memories is not None
        return self._services.memories.of(self._tenant, self._definition.id)

    @tool("/mem", "Remember something beyond this task.")
    async def mem_write(self, text: LongText, title: str = "") -> str:
        note = await self._memory.write(text, title)
        return f"OK: note {note.id}"

    @tool("/mem", "Read a note that you wrote.")
    async def mem_read(self, id: int) -> str:  # noqa: A002
        note = await self._memory.note(id)
        return f"{_headline(note)}\n{note.text}"

    @tool("/mem", "List your notes.")
    async def mem_show(self) -> str:
        return "\n".join(map(_headline, await self._memory.notes())) or "no notes"

    @tool("/mem", "Find notes by their words.")
    async def mem_search(self, query: ShortText) -> str:
        found = await self._memory.search(query)
        return "\n".join(f"{_headline(note)}\n{note.text}" for note in found) or "no notes match"

    @tool("/mem", "Forget one note, or all of them.")
    async def mem_clear(self, id: int | None = None) -> str:  # noqa: A002
        return f"OK: {await self._memory.clear(id)} forgotten"

    @tool("/advise", "Ask your advisor before you go on.")
    async def advise(self, question: LongText) -> str:
        assert self._advise is not None
        if self._consults_left <= 0:
            raise ToolFailed(f"the advisor may be asked {CONSULTS_MAX} times in one turn; go on without it")
        self._consults_left -= 1
        return await self._advise(question)

    @tool(ASK, "Ask the user something that you need to know. Ask only what nobody else can tell you.")
    async def ask_user(self, question: LongText) -> str:
        raise ToolFailed(f"the user cannot be asked here: {question!r}")

    def write_held_files(self) -> None:
        """Gives out the files that were held back."""
        files, self._files = self._files or {}, None
        for file in files.values():
            self._output.write_content(file)

    @tool("/write", "Give the user a file, as part of the answer.")
    async def write(self, path: FilePath, content: str, *, persist: bool = False) -> str:
        data = content.encode()
        if len(data) > self._file_bytes_left:
            raise ToolFailed(f"the files of one turn may have at most {FILE_BYTES_MAX} bytes together")
        self._file_bytes_left -= len(data)
        file = turn_files.file(path, data, media_type="text/plain")
        if persist and self._native:
            assert isinstance(file, Resource)
            file = msgspec.structs.replace(file, metadata={KEPT: True})
            self._kept_files[file_name_of(path)] = content
        if self._files is None:
            self._output.write_content(file)
        else:
            self._files[path] = file
        where = (
            "; it is kept in this conversation" if self._native else "; it is part of the answer and kept nowhere else"
        )
        return f"OK: wrote {path}, {len(data)} bytes{where if persist else ''}"

    @tool("/read", "Read a file that was kept in this conversation.")
    async def read(self, path: FilePath) -> str:
        name = file_name_of(path)
        found = {**await self._job.kept_files(), **self._kept_files}
        if name not in found:
            raise ToolFailed(f"no file {name!r} was kept in this conversation")
        return found[name]

    @tool("/list", "List the files that were kept in this conversation.")
    async def list_files(self) -> str:
        found = {**await self._job.kept_files(), **self._kept_files}
        lines = (f"{one_line(name)}, {len(text.encode())} bytes" for name, text in sorted(found.items()))
        return "\n".join(lines) or "no files"


TOOL_SPECS: Final = specs_of(Toolbox)


def _span_name(spec: ToolSpec | None, arguments: Mapping[str, Any]) -> str:
    """The tool's name in its span; `server.tool` for a tool of an MCP server."""
    if spec is None:
        return "unknown"
    server, tool = arguments.get("server"), arguments.get("tool")
    if spec.name == "mcp_call" and is_name(server) and is_name(tool):
        return f"{server}.{tool}"
    return spec.name


def _parse_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> msgspec.Struct:
    try:
        return msgspec.convert(dict(arguments), spec.arguments_type)
    except msgspec.ValidationError as wrong:
        raise ToolFailed(f"usage: {wrong}") from None


def _failure_text(answer: Answer) -> str:
    failure = answer.remote_failure
    if failure is None:
        return answer.text
    if failure.rpc_code is not None:
        return f"JSON-RPC error {failure.rpc_code}: {failure.message}"
    return f"HTTP {failure.status}: {failure.message}" if failure.status else f"transport: {failure.message}"


def _headline(note: MemoryNote) -> str:
    return f"{note.id}: {note.title}"
