"""The driver over the memory transport: complete hand-offs between real threads, with bytes compared."""

import numpy as np
import pytest

from kvferry.handoff.orders import StepOrders
from kvferry.settings import Role, TransferMode
from tests.harness.handoff_engines import Engine, memory_transports, offer, settings_for, until, want

MODES = list(TransferMode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("p_ranks", "d_ranks", "p_block", "d_block"), [(1, 1, 4, 4), (2, 1, 4, 8), (1, 2, 8, 4), (2, 4, 4, 4)]
)
def test_every_wanted_byte_arrives(mode: TransferMode, p_ranks: int, d_ranks: int, p_block: int, d_block: int) -> None:
    """R12, R22: both modes, several ranks per side, unequal blocks; progress in three steps; the note comes too."""
    _, transports = memory_transports()
    settings = settings_for(mode)
    p = Engine("p", Role.PREFILL, settings, transports, num_ranks=p_ranks, block_tokens=p_block)
    d = Engine("d", Role.DECODE, settings, transports, num_ranks=d_ranks, block_tokens=d_block)
    try:
        p.meet(d)
        d.meet(p)
        source, target = [5, 3, 9, 7, 11, 2], [4, 8, 1, 6, 20, 21]
        stop = 21
        p.fill(source, 1)
        d.submit(StepOrders(fetch=(want("t1", p, mode, target, 2, stop),)))
        p.submit(StepOrders(offer=(offer("t1", source, 9, final=False),)))
        p.submit(StepOrders(offer=(offer("t1", source, 17, final=False),)))
        p.submit(StepOrders(offer=(offer("t1", source, stop, note=b"first"),)))
        until(lambda: all(seen.landed for seen in d.seen) and all(seen.taken for seen in p.seen), p, d)
        np.testing.assert_array_equal(d.tokens(target, 2, stop), p.tokens(source, 2, stop))
        assert not d.tokens(target, 0, 2).any(), "decode's own prefix was overwritten"  # R30
        for seen in d.seen:
            assert [landed.note for landed in seen.landed] == [b"first"]
            assert seen.landed[0].arrived.stop == stop
            assert seen.landed[0].num_bytes > 0
            assert seen.landed[0].verified_cells > 0
            assert not seen.failed
        for seen in p.seen:
            assert seen.released == seen.taken == ["t1"]
    finally:
        d.close()
        p.close()
