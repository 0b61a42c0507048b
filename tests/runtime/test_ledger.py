"""Bytes on one device against its budget."""

import pytest

from harmony_lab.errors import DeviceMemoryError
from harmony_lab.program import TensorKind
from harmony_lab.runtime.ledger import Account, Ledger


def test_exceeding_the_budget_names_who_how_much_and_the_budget_and_counts_nothing() -> None:
    ledger = Ledger("emu0", 1000)
    ledger.allocated(TensorKind.WEIGHT, 900, "op a")
    with pytest.raises(
        DeviceMemoryError, match=r"emu0: op b needs 101 more bytes for saved, but 900 .*1000 bytes.*weight 900"
    ):
        ledger.allocated(TensorKind.SAVED, 101, "op b")
    assert ledger.alive_bytes == 900
    ledger.allocated(TensorKind.SAVED, 100, "op b")


def test_timeline_has_every_change_by_kind_and_starts_with_what_was_alive() -> None:
    ledger = Ledger("emu0", 1000)
    ledger.allocated(TensorKind.WEIGHT, 100, "op")
    ledger.begin(lambda: 0.0)
    ledger.allocated(TensorKind.SAVED, 30, "op")
    ledger.released(TensorKind.WEIGHT, 100)
    timeline = ledger.timeline()
    assert timeline.total_bytes.tolist() == [0, 100, 130, 30]
    assert timeline.num_bytes[-1, timeline.kinds.index(TensorKind.SAVED)] == 30
    assert timeline.peak_bytes == 130


def test_an_account_hands_its_bytes_over_without_counting_them_twice() -> None:
    ledger = Ledger("emu0", 100)
    account = Account(ledger, "op")
    account.allocated(60)
    account.allocated(40)
    with account.handing_over(TensorKind.ACTIVATION):
        account.released(60)
    account.become(TensorKind.SAVED)
    timeline = ledger.timeline()
    alive = dict(zip(timeline.kinds, timeline.num_bytes[-1].tolist(), strict=True))
    assert (alive[TensorKind.ACTIVATION], alive[TensorKind.SAVED], ledger.alive_bytes) == (60, 40, 100)
    account.released(10)
    assert ledger.alive_bytes == 90
    account.close()
    assert ledger.alive_bytes == 60
    account.released(30)  # a storage that outlived the op's owner
    assert ledger.alive_bytes == 60
