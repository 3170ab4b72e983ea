"""The driver over real NIXL, in one process: both modes, several ranks, progress; then one side restarts."""

import numpy as np
import pytest

from kvferry.handoff.orders import StepOrders
from kvferry.ids import PeerName
from kvferry.settings import Role, TransferMode
from kvferry.transport.base import Transport
from tests.harness.handoff_engines import Engine, offer, settings_for, until, want

pytestmark = pytest.mark.process

SOURCE, TARGET = [5, 3, 9, 7, 11, 2], [4, 8, 1, 6, 20, 21]


def _nixl(name: PeerName) -> Transport:
    from kvferry.transport.nixl.nixl import NixlTransport

    return NixlTransport(name, settle_s=0.1)


@pytest.mark.parametrize("mode", list(TransferMode), ids=str)
def test_every_wanted_byte_arrives_over_nixl(mode: TransferMode) -> None:
    """R12, R22, I6."""
    settings = settings_for(mode, ttl_s=4.0, deadline_s=20.0)
    p = Engine("p", Role.PREFILL, settings, _nixl, num_ranks=2)
    d = Engine("d", Role.DECODE, settings, _nixl, block_tokens=8)
    again = None
    try:
        for other, transfer in ((p, "t1"), (None, "t2")):
            if other is None:
                p.close()
                other = again = Engine("p", Role.PREFILL, settings, _nixl, num_ranks=2, start="2")
            other.meet(d)
            d.meet(other)
            other.fill(SOURCE, 1 if transfer == "t1" else 2)
            d.submit(StepOrders(fetch=(want(transfer, other, mode, TARGET, 0, 21),)))
            other.submit(StepOrders(offer=(offer(transfer, SOURCE, 9, final=False),)))
            other.submit(StepOrders(offer=(offer(transfer, SOURCE, 21, note=b"first"),)))
            until(lambda other=other, transfer=transfer: all(transfer in seen.taken for seen in other.seen), other, d)  # type: ignore[misc]
            # Decode confirms first, and then reports.
            until(lambda transfer=transfer: transfer in [one.transfer for one in d.seen[0].landed], d)  # type: ignore[misc]
            np.testing.assert_array_equal(d.tokens(TARGET, 0, 21), other.tokens(SOURCE, 0, 21))
            assert d.seen[0].landed[-1].verified_cells > 0
            assert not d.seen[0].failed
    finally:
        d.close()
        p.close()
        if again is not None:
            again.close()
