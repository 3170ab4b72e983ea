"""The connector in the process of vLLM's scheduler: an EngineConnector, put together from the RankInfo of every worker.

Workers are other processes. They learn of peers by a channel of their own (channel.worker_channel), and report by it:
so the engine sleeps while peers read what it has computed, and frees the blocks when the report comes. On a CPU the
other orders go by that channel too, as soon as they are made: no step of the engine lies between a request and its
transfer.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvferry.connector.base import PeerGone, RankRecord, StepOrders, StepReport
from kvferry.connector.engine import EngineConnector
from kvferry.engines.vllm.channel.channel_hub import ChannelHub
from kvferry.engines.vllm.describe.engine_facts import backoff_tokens, describe
from kvferry.engines.vllm.describe.introspect import group_forms
from kvferry.engines.vllm.metadata import RankInfo
from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.scheduler_side.engine_sleep import EngineSleep
from kvferry.engines.vllm.scheduler_side.scheduler import Ended, VllmScheduler
from kvferry.errors import ConfigError
from kvferry.ids import Incarnation
from kvferry.layout.description import CacheKind
from kvferry.settings import FerrySettings
from kvferry.wire.layout_codec import decode_layout

__all__ = ["VllmEngine", "start_engine"]

_REST_S = 0.1
_COUNT_AFTER_S = 0.02
"""A step for vLLM's metrics can wait while decode, with the blocks that came back, has its first token to compute."""

logger = logging.getLogger(__name__)


class VllmEngine:
    """One an engine. `scheduler` is for the engine's thread alone."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        connector: EngineConnector,
        mail: ChannelHub,
        wake: EngineSleep | None,
        *,
        direct: bool,
    ) -> None:
        """`direct`: orders go by line. Not where a device's stream has to come to them first."""
        self.scheduler = scheduler
        self._connector = connector
        self._mail = mail
        self._wake = wake
        self._direct = direct and mail.connected
        self._untold = Ended()
        self._changed = self._waited = False
        """Blocks came back since the last step: vLLM counts them, for its metrics, at the end of one."""
        self._may_rest = False
        """The step that is under way brings nothing."""

    def build_orders(self, preempted: Iterable[str], *, computes: bool) -> tuple[StepOrders, frozenset[str]]:
        """The orders of this step, with the peers that came and went since the last one. `computes`: it does more."""
        self._changed = False
        self.scheduler.prepare(preempted)
        came, left = self._mail.take()
        self.send_orders()
        orders, doomed = self.scheduler.build_orders()
        if came or left:
            orders = replace(orders, accepted=came, gone=left)
        self._may_rest = not (computes or doomed or orders) and self.listens
        return orders, doomed

    @property
    def listens(self) -> bool:
        """vLLM is to be told something when this step ends, or as soon as it comes by line."""
        return self._mail.connected and bool(self.scheduler.num_receiving or self._mail.has_news or self._untold)

    def _rest(self) -> None:
        """In a step that brings nothing: sleep while all that the engine has waits for peers.

        vLLM would make such steps a thousand times a second, with the processor that prefill computes on if it is the
        same. A worker's news, or a request, ends it at once; and so does a moment, for whatever else there may be.
        """
        wake, waiting = self._wake, self.scheduler.num_receiving
        if wake is None or not waiting or wake.ending or self._mail.has_news or self._untold:
            return
        if wake.is_all(waiting):
            wake.sleep(_REST_S)

    def send_orders(self) -> None:
        """What the scheduler half has to say, now instead of with the next step, where that can be."""
        if self._direct and (orders := self.scheduler.take_orders()):
            self._mail.send(orders)

    def has_pending_work(self) -> bool:
        """The engine must step although no request runs. Not for blocks that a peer may read: the worker tells."""
        self._hear()
        if self._changed and not self._waited and self._wake is not None:
            self._waited = True
            self._wake.sleep(_COUNT_AFTER_S)  # a request ends it at once
        if self.scheduler.has_orders or self._mail.pending or self._untold or self._changed:
            return True
        # One that is told to end goes when nothing is pending: with the blocks that peers still read.
        return (self._wake is None or self._wake.ending) and self.scheduler.has_pending_work()

    def update(self, reports: Sequence[StepReport], lost: Iterable[PeerGone]) -> Ended:
        """At the end of a step: what the workers said with it, and by line. vLLM is to be told all of it now."""
        if self._may_rest and not reports:
            self._rest()
        self._take(reports, lost)
        self._hear()
        self._changed = False
        ended, self._untold = self._untold, Ended()
        return ended

    def _hear(self) -> None:
        """Blocks that come back are free at once; vLLM is told the rest at the end of a step."""
        if self._mail.has_news:
            self._take(*self._mail.take_news())

    def _take(self, reports: Sequence[StepReport], lost: Iterable[PeerGone]) -> None:
        for peer in lost:
            self._connector.lost(peer.engine, peer.incarnation, peer.reason)
        if reports:
            self._untold += self.scheduler.update(reports)
            self._changed, self._waited = True, bool(self._untold)

    def close(self) -> None:
        """No socket, no thread remains."""
        self._connector.close()
        self._mail.close()


def start_engine(
    config: Any, cache_config: Any, options: Options, cards: Sequence[RankInfo], version: str, wake: EngineSleep | None
) -> VllmEngine:
    """Put the engine together, and begin to answer peers. Raises ConfigError; then nothing is left behind.

    `wake` wakes the engine for what workers report (engine_sleep). None: it steps for as long as a hand-off is open.
    """
    if not cards:
        raise ConfigError("no rank has registered a cache: every worker of this engine must load kvferry's connector")
    ferry = _with_own_port(options.ferry, config)
    kernel_tokens = [
        next((tokens for tokens in each if tokens is not None), None)
        for each in zip(*(card.kernel_tokens for card in cards), strict=True)
    ]
    forms = group_forms(cache_config, kernel_tokens)
    description = describe(
        config,
        version=version,
        settings=ferry,
        role=options.role,
        backends={name for card in cards for name in card.backends},
        packings={tag for card in cards for tag in card.packings},
        state_dtypes={text for card in cards for text in card.state_dtypes},
        block_tokens=[form.block_tokens for form in forms],
        layer_groups=dict(pair for card in cards for pair in card.layer_groups),
        kv_layout=cache_config.kv_cache_layout,
    )
    connector = EngineConnector(
        description,
        ferry,
        engine_id=str(config.kv_transfer_config.engine_id),
        mode_remedy='give both the same "mode" in kv_connector_extra_config',
    )
    mail = ChannelHub(wake)
    try:
        mail.connect([card.line for card in cards])
        half = connector.start([_record(card) for card in cards], mail.send_peers)
    except BaseException:
        connector.close()
        mail.close()
        raise
    lookahead = int(config.num_prefill_lookahead_tokens)
    kinds = {form.kind for form in forms}
    scheduler = VllmScheduler(
        half,
        forms,
        engine_id=connector.engine_id,
        mode=ferry.transfer.mode,
        policy=ferry.transfer.on_failure,
        backoff=backoff_tokens(lookahead, states=CacheKind.STATE in kinds, windows=CacheKind.WINDOW in kinds),
        # A chain of MTP modules rewrites the end of a chunk in the next one: then only the whole prompt is offered.
        progress=ferry.transfer.progress and lookahead <= 1,
        group_ids=cache_config.transfer_group_ids,
    )
    identity = connector.identity
    logger.info(
        "kvferry ready engine=%s incarnation=%s role=%s mode=%s side_channel=%s:%s ranks=%d",
        identity.engine,
        identity.incarnation,
        options.role,
        ferry.transfer.mode,
        identity.host,
        identity.port,
        len(cards),
    )
    return VllmEngine(scheduler, connector, mail, wake, direct=str(config.device_config.device_type) == "cpu")


def _record(card: RankInfo) -> RankRecord:
    return RankRecord(
        layout=decode_layout(card.layout),
        incarnation=Incarnation(card.incarnation),
        transport=card.transport,
        transport_metadata=card.transport_metadata,
    )


def _with_own_port(ferry: FerrySettings, config: Any) -> FerrySettings:
    """Data-parallel engines of one server are configured alike: give each a port of its own to listen on."""
    side_channel = ferry.side_channel
    if not side_channel.port:
        return ferry
    port = side_channel.port + int(config.parallel_config.data_parallel_index)
    return replace(ferry, side_channel=replace(side_channel, port=port))
