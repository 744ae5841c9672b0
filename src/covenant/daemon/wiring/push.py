"""Push notifications of a daemon, where they are switched on: who takes configurations, and who delivers."""

from __future__ import annotations

import random
from dataclasses import fields

from covenant.daemon.settings import Settings
from covenant.doors.metrics import Meter
from covenant.exchange.a2a_service import A2AExchange
from covenant.exchange.push import PushConfigs, check_config
from covenant.ledger.contract.ledger import Ledger
from covenant.model.a2a_requests import PushConfig
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.push_sender import PushLimits, PushSender, WebhookClient
from covenant.outbound.urls import read_url
from covenant.seal.webhooks import WebhookSigner


def check_push(config: PushConfig) -> None:
    """By its text alone: where its address leads is nobody's business before it is called."""
    check_config(config, _check_url)


def _check_url(text: str) -> None:
    read_url(text)


def make_pushes(
    settings: Settings, ledger: Ledger, conversations: A2AExchange, *, fetcher: Fetcher, key: bytes, meter: Meter
) -> tuple[PushConfigs, PushSender] | tuple[None, None]:
    """Who takes configurations, and who delivers, signed with the daemon's own key, while it runs."""
    if not settings.a2a.push_notifications:
        return None, None
    limits = PushLimits(**{part.name: getattr(settings.push, part.name) for part in fields(PushLimits)})
    webhooks = WebhookClient(fetcher, WebhookSigner(key), ledger.now_ms)
    runner = PushSender(ledger, webhooks, limits, chance=random.random, tally=meter.pushed)
    return PushConfigs(ledger, conversations.scope, check_push), runner
