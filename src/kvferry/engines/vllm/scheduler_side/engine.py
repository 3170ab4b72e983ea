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
    """One per engine. `scheduler` is used only on the engine's thread."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        connector: EngineConnector,
        hub: ChannelHub,
        wake: EngineSleep | None,
        *,
        direct: bool,
    ) -> None:
        """`direct`: orders go through the channel; not if they must wait for a device's stream."""
        self.scheduler = scheduler
        self._connector = connector
        self._hub = hub
        self._wake = wake
        self._direct = direct and hub.connected
        self._unreported = Ended()
        self._changed = self._waited = False
        """Whether blocks came back since the last step: vLLM counts them for its metrics at the end of a step."""
        self._step_is_empty = False
        """Whether the step that is under way has nothing to do."""

    def build_orders(self, preempted: Iterable[str], *, computes: bool) -> tuple[StepOrders, frozenset[str]]:
        """Returns this step's orders, with the peers that came and went. `computes`: the step has other work, too."""
        self._changed = False
        self.scheduler.prepare(preempted)
        came, left = self._hub.take()
        self.send_orders()
        orders, failing = self.scheduler.build_orders()
        if came or left:
            orders = replace(orders, accepted=came, gone=left)
        self._step_is_empty = not (computes or failing or orders) and self.report_expected
        return orders, failing

    @property
    def report_expected(self) -> bool:
        """Whether there is something to report to vLLM when this step ends, or as soon as a worker reports."""
        return self._hub.connected and bool(self.scheduler.num_receiving or self._hub.has_reports or self._unreported)

    def _sleep_while_waiting(self) -> None:
        """Sleeps, in a step that has nothing to do, while all that the engine has waits for peers.

        vLLM would make such steps a thousand times per second, on the processor that prefill needs, if it is the
        same. A worker's report or a request ends the sleep at once; it is short in any case, for whatever else there
        may be.
        """
        wake, waiting = self._wake, self.scheduler.num_waiting
        if wake is None or not self.scheduler.num_receiving or wake.ending or self._hub.has_reports or self._unreported:
            return
        if wake.is_all(waiting):
            wake.sleep(_REST_S)

    def send_orders(self) -> None:
        """Sends the scheduler half's orders now instead of with the next step, if that is possible."""
        if self._direct and (orders := self.scheduler.take_orders()):
            self._hub.send(orders)

    def has_pending_work(self) -> bool:
        """Whether the engine must step although no request runs; not for blocks that a peer may read: a report wakes
        it.
        """
        self._receive()
        if self._changed and not self._waited and self._wake is not None:
            self._waited = True
            self._wake.sleep(_COUNT_AFTER_S)  # a request ends it at once
        if self.scheduler.has_orders or self._hub.pending or self._unreported or self._changed:
            return True
        # An engine that is shutting down ends when nothing is pending; peers may still be reading its blocks.
        return (self._wake is None or self._wake.ending) and self.scheduler.has_pending_work()

    def update(self, reports: Sequence[StepReport], lost: Iterable[PeerGone]) -> Ended:
        """At the end of a step: takes what the workers reported with it and through the channel; vLLM receives all of
        it now.
        """
        if self._step_is_empty and not reports:
            self._sleep_while_waiting()
        self._take(reports, lost)
        self._receive()
        self._changed = False
        ended, self._unreported = self._unreported, Ended()
        return ended

    def _receive(self) -> None:
        """Takes reports: blocks that come back are free at once, everything else is reported to vLLM at a step's
        end.
        """
        if self._hub.has_reports:
            self._take(*self._hub.take_reports())

    def _take(self, reports: Sequence[StepReport], lost: Iterable[PeerGone]) -> None:
        for peer in lost:
            self._connector.lost(peer.engine, peer.incarnation, peer.reason)
        if reports:
            self._unreported += self.scheduler.update(reports)
            self._changed, self._waited = True, bool(self._unreported)

    def close(self) -> None:
        """Closes every socket and ends every thread."""
        self._connector.close()
        self._hub.close()


def start_engine(
    config: Any, cache_config: Any, options: Options, ranks: Sequence[RankInfo], version: str, wake: EngineSleep | None
) -> VllmEngine:
    """Put the engine together, and begin to answer peers. Raises ConfigError; then nothing is left behind.

    `wake` wakes the engine for what workers report (engine_sleep). None: it steps for as long as a hand-off is open.
    """
    if not ranks:
        raise ConfigError("no rank has registered a cache: every worker of this engine must load kvferry's connector")
    ferry = _with_own_port(options.ferry, config)
    kernel_tokens = [
        next((tokens for tokens in each if tokens is not None), None)
        for each in zip(*(info.kernel_tokens for info in ranks), strict=True)
    ]
    forms = group_forms(cache_config, kernel_tokens)
    description = describe(
        config,
        version=version,
        settings=ferry,
        role=options.role,
        backends={name for info in ranks for name in info.backends},
        packings={tag for info in ranks for tag in info.packings},
        state_dtypes={text for info in ranks for text in info.state_dtypes},
        block_tokens=[form.block_tokens for form in forms],
        layer_groups=dict(pair for info in ranks for pair in info.layer_groups),
        kv_layout=cache_config.kv_cache_layout,
    )
    connector = EngineConnector(
        description,
        ferry,
        engine_id=str(config.kv_transfer_config.engine_id),
        mode_remedy='give both the same "mode" in kv_connector_extra_config',
    )
    hub = ChannelHub(wake)
    try:
        hub.connect([info.channel_address for info in ranks])
        half = connector.start([_record(info) for info in ranks], hub.send_peers)
    except BaseException:
        connector.close()
        hub.close()
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
        len(ranks),
    )
    return VllmEngine(scheduler, connector, hub, wake, direct=str(config.device_config.device_type) == "cpu")


def _record(info: RankInfo) -> RankRecord:
    return RankRecord(
        layout=decode_layout(info.layout),
        incarnation=Incarnation(info.incarnation),
        transport=info.transport,
        transport_metadata=info.transport_metadata,
    )


def _with_own_port(ferry: FerrySettings, config: Any) -> FerrySettings:
    """Data-parallel engines of one server are configured alike: give each a port of its own to listen on."""
    side_channel = ferry.side_channel
    if not side_channel.port:
        return ferry
    port = side_channel.port + int(config.parallel_config.data_parallel_index)
    return replace(ferry, side_channel=replace(side_channel, port=port))
