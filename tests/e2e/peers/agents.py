"""The agents that daemons have in these tests. Each does one thing that a test needs to see from outside."""

from typing import Final

AGENTS: Final = '''
import asyncio, os, pathlib
from covenant import Agent

FOLDER = pathlib.Path(os.environ["FOLDER"])
NODE = os.environ["NODE"]


def note(line):
    """The effect that must not be doubled."""
    with (FOLDER / "runs").open("a") as file:
        file.write(f"{NODE} {line}\\n")


async def gate(name):
    while not (FOLDER / name).exists():
        await asyncio.sleep(0.02)


echo, researcher, spender = Agent("echo"), Agent("researcher"), Agent("spender")
held, slow, relay, boss = Agent("held"), Agent("slow"), Agent("relay"), Agent("boss")
shower, leaker, giver, bulky = Agent("shower"), Agent("leaker"), Agent("giver"), Agent("bulky")


@echo
async def say(turn):
    note(f"echo {turn.text}")
    turn.spend(7)
    return f"echo {turn.text}"


@researcher
async def research(turn):
    note("researcher")
    turn.spend(5)
    return f"found by {NODE}: {turn.text}"


@spender
async def waste(turn):
    """Spends what it is told to, in steps."""
    for n in range(int(turn.text) // 10):
        turn.spend(10)
        yield f"step {n}"
        await asyncio.sleep(0)


@held
async def wait_and_tell(turn):
    """Until there is a file of the name that it is told."""
    note(f"held {turn.text}")
    turn.spend(3)
    yield turn.status(f"waiting for {turn.text}")
    await gate(turn.text)
    yield "ended"


@slow
async def dawdle(turn):
    note(f"slow {turn.text}")
    yield "begun"
    await asyncio.Event().wait()


@relay
async def pass_on(turn):
    """`bob/echo some text`: delegate, and tell what came of it."""
    who, _, text = turn.text.partition(" ")
    try:
        answer = await turn.call(who, text or ".")
    except Exception as refused:
        return f"{NODE}>refused: {refused}"
    return f"{NODE}>{answer.state}: {answer.text}"


@boss
async def have_it_done(turn):
    note("boss")
    answer = await turn.call("finder", turn.text)
    return f"{answer.state}: {answer.text}"


@shower
async def show(turn):
    """What it was given, whole."""
    extra = "|".join(str(part) for part in turn.parts)
    return f"{turn.text}|{extra}|{turn.metadata}"


@bulky
async def weigh(turn):
    """As many characters as it is told, in parts."""
    for number in range(0, int(turn.text), 262_144):
        yield turn.file(f"part{number}.txt", b"word " * 52_428)
    yield "so much" + " more" * 1000


@leaker
async def leak(turn):
    """What it was given, as a value in data."""
    return turn.reply("see there", turn.data({"apiKey": turn.text, "max_token": 500}))


@giver
async def give(turn):
    """`bob/echo secret`: hand it on as a value in data."""
    who, _, text = turn.text.partition(" ")
    answer = await turn.call(who, turn.data({"apiKey": text, "max_token": 500}))
    return f"{answer.state}: {answer.text}"
'''

FINDER: Final = """
from covenant import Agent

finder = Agent("finder")


@finder
async def find(turn):
    turn.spend(5)
    return f"found: {turn.text}"
"""
