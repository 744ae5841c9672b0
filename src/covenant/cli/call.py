"""`covenant call`: have somebody else's agent do something."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from covenant.cli.a2a.texts import read_text
from covenant.cli.ages import Duration
from covenant.cli.failures import ExitCode
from covenant.cli.output import brief, put, put_json, say, shape
from covenant.cli.remote_calls import calls_out, told

if TYPE_CHECKING:
    from covenant.daemon.connecting import Options
    from covenant.model.remote import Heard
    from covenant.outbound.remote import RemoteStream
    from covenant.outbound.reply import Reply


@click.command(
    "call", epilog=shape("remote_reply", "state", "text", "task_id", "context_id", "artifacts", "usage", "way")
)
@click.argument("target", metavar="NAME|URL")
@click.argument("message")
@click.option("--stream", "as_it_comes", is_flag=True, help="Write the answer as it comes.")
@click.option("--poll", is_flag=True, help="Ask again and again, even if the agent has streams.")
@click.option(
    "--timeout", "timeout_ms", type=Duration(), metavar="5m", help="Longest wait. Default: 5m, or the entry's."
)
@click.option("--task", "task_id", metavar="ID", help="Answer what this task of the agent asks.")
@click.option("--context", "context_id", metavar="ID", help="The context that it belongs to.")
@click.option("--key", "idempotency_key", help="Idempotency key: names the work, so that it may be sent again.")
@calls_out
def command(
    options: Options, *, target: str, message: str, as_json: bool, as_it_comes: bool, poll: bool, **given: Any
) -> None:
    """Send MESSAGE to an agent, and wait for its answer; `-` reads the message from standard input.

    The agent is named by its URL, by the URL of its card, or by its name in a2a_agents.json. It gets the message, its
    own token, and nothing else. Ctrl-C and a timeout cancel its task. Exits with 1 unless the task completed.
    """
    text = read_text(message)
    timeout_ms = given.pop("timeout_ms")
    given |= {"timeout_s": timeout_ms / 1000 if timeout_ms is not None else None, "stream": False if poll else None}
    teller = Teller(live=as_it_comes and not as_json)

    async def converse() -> tuple[Reply, str]:
        from covenant.daemon.connecting import open_remote

        async with await open_remote(target, options) as remote:
            stream = teller.stream = remote.stream(text, **given, troubled=teller.troubled)
            async for news in stream:
                teller.tell(news)
            return stream.reply, f"{remote.way.binding} {remote.way.version}"

    reply, way = told(converse, target, options, canceled=lambda: f"canceled{teller.called_off}")
    if as_json:
        put_json(_shown(reply, way))
    else:
        teller.end(reply)
    if not reply.ok:
        raise click.exceptions.Exit(ExitCode.REFUSED)


class Teller:
    """Progress for whoever watches a terminal, on stderr; and the answer as it comes, if that is wanted."""

    def __init__(self, *, live: bool) -> None:
        self._live = live
        self._watched = sys.stderr.isatty()
        self._wrote: list[str] = []
        self._state: str | None = None
        self.stream: RemoteStream | None = None
        """What is told of."""

    @property
    def called_off(self) -> str:
        return self.stream.called_off if self.stream is not None else ""

    def tell(self, news: Heard) -> None:
        from covenant.model.remote import RemoteStatus, RemoteTask

        if not isinstance(news, RemoteStatus | RemoteTask):
            if self._live and news.text:
                self._wrote.append(news.text)
                put(news.text, nl=False)
        elif self._watched and not news.state.terminal:
            said = f"{news.state.value}: {brief(news.text)}" if news.text else news.state.value
            if said != self._state:
                self._state = said
                say(f"· {said}")

    def troubled(self, why: str) -> None:
        if self._watched:
            self._state = None
            say(f"· {why}; asking again")

    def end(self, reply: Reply) -> None:
        from covenant.model.content import Json, Text

        wrote = "".join(self._wrote)
        if wrote and not wrote.endswith("\n"):
            click.echo()
        if reply.text and reply.text.strip() not in wrote:
            put(reply.text)
        if reply.waits:
            say(f"covenant: it waits for you ({reply.state.value}); answer with --task {reply.task_id}")
        elif not reply.ok:
            say(f"covenant: the task was not completed: {reply.state.value}")
        for artifact in reply.artifacts:
            if not all(isinstance(part, Text | Json) for part in artifact.parts):
                say(f"· made {artifact.name or artifact.artifact_id}; --json shows it")


def _shown(reply: Reply, way: str) -> dict[str, Any]:
    import msgspec

    return {
        "kind": "remote_reply",
        "state": reply.state.value,
        "text": reply.text,
        "task_id": reply.task_id,
        "context_id": reply.context_id,
        "artifacts": msgspec.to_builtins(reply.artifacts),
        "usage": reply.usage,
        "way": way,
    }
